"""Load a policy and its tokenizer; log probabilities of tokens without a tensor of all logits.

A name is `tiny` (common/tiny.py), a run directory of one of the scripts, a folder written by save_pretrained,
or a name on the hub.
"""

import re
import types
from pathlib import Path

import jinja2
import torch
from torch.utils.checkpoint import checkpoint

from common import dist, tiny
from common.run import InputError

SPARE = re.compile(r"^\W*(finetune_right_)?pad(ding)?(_id)?\W*$|reserved", re.I)  # tokens kept for such a use
SCALED_LOGITS = {  # what models do to logits after the unembedding, and when it changes nothing
    "final_logit_softcapping": None, "softcap": None, "logit_scale": 1.0, "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0, "output_multiplier": 1.0,
}  # fmt: skip
LOGITS_IN_MEMORY = 2**24  # elements of a chunk of logits, 64 MB in fp32, whatever B, T and V are


# -- loading ---------------------------------------------------------------------------------------
def find_model(name: str) -> str:
    """The folder or hub name that `name` stands for: a run directory becomes its model/. InputError if the
    run has not finished, or nothing is there."""
    path = Path(name)
    if name == "tiny" or (path / "config.json").exists():
        return name
    if (path / "summary.json").exists() and (path / "model" / "config.json").exists():
        return str(path / "model")
    if (path / "args.json").exists():
        raise InputError(f"{name} is a run that has not finished: give its command with --resume first")
    if path.exists():
        raise InputError(f"{name} holds no config.json: it is neither a model folder nor a run directory")
    if path.is_absolute() or name.startswith((".", "runs/")) or name.count("/") > 1:
        script = Path(__file__).parents[1] / f"{path.name}.py"
        mend = f"`python {script.name}` makes it" if script.exists() else "check the path"
        raise InputError(f"there is no {name}: {mend} (hub names look like organisation/model)")
    return name


def load_tokenizer(name: str, chat_template: str | None = None):
    """The tokenizer of a model, ready for chat: it has a chat template, its end token is the one that ends
    the template's assistant turn, and its padding token is another one. What had to be changed is printed.

    chat_template: a file with a jinja template that replaces the tokenizer's own."""
    from transformers import AutoTokenizer

    try:
        tokenizer = tiny.tokenizer() if name == "tiny" else AutoTokenizer.from_pretrained(find_model(name))
    except OSError as error:  # not on the hub, no network, or files missing in the folder
        raise InputError(f"--model {name}: {error}") from None
    say = print if dist.is_main() else lambda *_: None
    if chat_template:
        if not Path(chat_template).is_file():
            raise InputError(f"--chat-template {chat_template}: there is no such file")
        tokenizer.chat_template = Path(chat_template).read_text()
    if not tokenizer.chat_template:
        raise InputError(f"{name} has no chat template: give one with --chat-template FILE (jinja)")
    end = _end_of_turn(tokenizer, name)
    if end != tokenizer.eos_token_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        say(f"{name}: the chat template ends a turn with {tokenizer.eos_token!r}, so that is the end token")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # If padding were the end token, a mask made from ids anywhere would drop real end tokens
        spare = [t for t in tokenizer.get_added_vocab() if SPARE.search(t) and t != tokenizer.eos_token]
        tokenizer.add_special_tokens({"pad_token": spare[0] if spare else "<|pad|>"})
        say(f"{name}: padding was unset or the end token; from now on it is {tokenizer.pad_token!r}")
    return tokenizer


def _end_of_turn(tokenizer, name) -> int:
    """The first special token after an assistant turn's text in the chat template; else the end token."""
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "the answer"}]
    try:
        after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("the answer")[2]
    except jinja2.TemplateError as error:
        raise InputError(f"{name}: the chat template does not work: {error} (--chat-template FILE)") from None
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    end = next((i for i in ids if i in special), tokenizer.eos_token_id)
    if end is None:
        raise InputError(f"{name}: neither tokenizer nor chat template has an end token: nothing could end")
    return end


def load_policy(name, tokenizer, gradient_checkpointing=False, seed=0):
    """A causal LM in fp32 with dropout off and the method `token_logprobs`. Rank 0 reads the weights, other
    ranks get a model on the "meta" device: pass it to dist.shard next. seed: of the random weights of `tiny`.

    InputError for models whose logits are not simply the unembedding of the last hidden state."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == "tiny":
        model = tiny.model(seed)
    else:
        folder = find_model(name)
        config = AutoConfig.from_pretrained(folder)
        kind = (config.architectures or ["ForCausalLM"])[0]
        if not any(name in kind for name in ("ForCausalLM", "LMHeadModel")):
            raise InputError(f"{folder} is a {kind}, wanted a causal language model")
        for key, neutral in SCALED_LOGITS.items():
            if getattr(config.get_text_config(), key, None) not in (None, neutral):
                raise InputError(f"{name}: {config.model_type} has {key}, which token_logprobs does not know")
        for key, value in config.to_dict().items():  # with dropout, new and old probabilities never agree
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)
        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}  # the sampler's masks need it
        try:
            if dist.is_main():
                model = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
            else:
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(config, **options)
        except ValueError as error:  # no causal language model of this kind, or none with sdpa
            raise InputError(f"{name}: {error}") from None
    _fit_embeddings(model, len(tokenizer))
    sampling = model.generation_config
    if any(getattr(sampling, key, None) is not None for key in ("temperature", "top_p", "top_k")):
        sampling.do_sample = True  # transformers refuses to save these without it, hours from now
    for settings in (model.config, sampling):  # as the tokenizer has them now
        settings.pad_token_id, settings.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.token_logprobs = types.MethodType(token_logprobs, model)
    model.forward_methods = ("token_logprobs",)  # dist.shard has these gather weights too
    return model.train()


def _fit_embeddings(model, n_tokens):
    """Add rows to the embeddings for tokens added to the vocabulary, as the mean of the others: a new token
    is then as likely as an average one, and the rest hardly changes. A table that is larger already stays as
    it is."""
    old = model.get_input_embeddings().weight.shape[0]
    if n_tokens <= old:
        return
    model.resize_token_embeddings(n_tokens, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[old:] = module.weight[:old].mean(0)


@torch.no_grad()
def check_packing(model):
    """InputError if, with two documents in a row, what the first one says changes the second: transformers
    keeps packed documents apart by their positions, but not in every model. Every rank must call it."""
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]], device=device)
    mask = positions[:, 1:] > 0
    seconds = []
    for first in (3, 4):  # the same shapes, so that the second document's figures agree to the last bit
        ids = [first * (i + 1) % vocabulary for i in range(5)] + [i % vocabulary for i in range(7)]
        seconds.append(model.token_logprobs(torch.tensor([ids], device=device), mask, positions)[:, 5:])
    leak = (seconds[0] - seconds[1]).abs().max().item()
    if not leak < 1e-6:
        kind = model.config.model_type
        raise InputError(f"{kind}: packed documents see each other ({leak:.2g} nats), use --no-packing")


# -- log probabilities -----------------------------------------------------------------------------
def token_logprobs(model, input_ids, action_mask, position_ids=None, temperature=1.0, entropy=False):
    """log pi(token t+1 | tokens <= t) for every action, computed only where action_mask is True.

    input_ids: (B, T), right-padded: under causal attention no token sees the padding after it, so no
      attention mask is needed.
    action_mask: (B, T-1) bool, True where token t+1 is an action.
    position_ids: (B, T); where they begin again at 0, a packed document begins that sees nothing before it.
    temperature: divides the logits.
    Returns (B, T-1) fp32 in nats, 0 where action_mask is False; with entropy=True also the entropy (nats, no
    gradient) of each of these distributions.

    Call it as a method, `model.token_logprobs(...)`: dist.shard has that gather the weights. The unembedding
    runs on chunks of the kept positions, and once more in backward: a (B, T, V) tensor of logits never
    exists."""
    dtype = getattr(model, "compute_dtype", torch.float32)
    cast = dist.world_size() == 1 and dtype != torch.float32  # sharded models cast by FSDP's own policy
    with torch.autocast(input_ids.device.type, dtype, enabled=cast):
        body = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        # (n, H), (n,). On a rank without loss n is 0: empty tensors still connect every weight to the
        # gradient
        hidden, targets = body.last_hidden_state[:, :-1][action_mask], input_ids[:, 1:][action_mask]
        head, parts = model.get_output_embeddings(), []
        size = max(1, LOGITS_IN_MEMORY // head.weight.shape[0])
        for chunk in zip(hidden.split(size), targets.split(size)):
            inputs = (head, *chunk, temperature, entropy)
            again = torch.is_grad_enabled()
            parts.append(checkpoint(_chunk, *inputs, use_reentrant=False) if again else _chunk(*inputs))
    zeros = torch.zeros(action_mask.shape, device=input_ids.device)
    logprobs, entropies = (zeros.masked_scatter(action_mask, torch.cat(part)) for part in zip(*parts))
    return (logprobs, entropies) if entropy else logprobs


def _chunk(head, hidden, targets, temperature, entropy):
    logits = head(hidden).float() / temperature  # (n, V); a log-softmax in bf16 is off by 1e-2
    log_z = logits.logsumexp(-1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - log_z
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.no_grad():  # H = log Z - sum_v p_v logit_v
        return logprobs, log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1)
