"""Load a policy and its tokenizer; log probabilities of tokens without a tensor of all logits.

A name is `tiny` (common/tiny.py), a run directory of one of the scripts, a folder written by save_pretrained, or a name on the hub.
"""

import types
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from common import dist, tiny
from common.run import InputError

LOGITS_IN_MEMORY = 2**24  # elements of one chunk of logits (64 MB in fp32); chunks bound memory, whatever B, T and V are


# -- loading ---------------------------------------------------------------------------------------------------------------------------
def find_model(name: str) -> str:
    """The folder or hub name that `name` stands for: a run directory becomes its model/. InputError if the run has not finished."""
    path = Path(name)
    if name == "tiny" or (path / "config.json").exists():
        return name
    if (path / "summary.json").exists() and (path / "model" / "config.json").exists():
        return str(path / "model")
    if (path / "args.json").exists():
        raise InputError(f"{name} is a run that has not finished: go on with its command and --resume, then use it")
    if path.exists():
        raise InputError(f"{name} holds no config.json: it is neither a model folder nor a run directory")
    if path.is_absolute() or name.startswith((".", "runs/")) or name.count("/") > 1:
        stage = path.name if name.startswith("runs/") else None
        how = f"`python {stage}.py` makes it" if stage else "check the path; a hub name looks like organisation/model"
        raise InputError(f"there is no {name}: {how}")
    return name


def load_tokenizer(name: str, chat_template: str | None = None):
    """The tokenizer of a model, ready for chat: it has a chat template, its end token is the one that ends the template's assistant
    turn, and its padding token is another one. What had to be changed is printed.

    chat_template: a file with a jinja template that replaces the tokenizer's own."""
    from transformers import AutoTokenizer

    tokenizer = tiny.tokenizer() if name == "tiny" else AutoTokenizer.from_pretrained(find_model(name))
    if chat_template:
        if not Path(chat_template).is_file():
            raise InputError(f"--chat-template {chat_template}: there is no such file")
        tokenizer.chat_template = Path(chat_template).read_text()
    if not tokenizer.chat_template:
        raise InputError(f"the tokenizer of {name} has no chat template: give one with --chat-template FILE (jinja, as transformers takes it)")
    say = print if dist.is_main() else lambda *_: None
    end = _end_of_turn(tokenizer, name)
    if end != tokenizer.eos_token_id:
        say(f"{name}: the chat template ends a turn with {tokenizer.convert_ids_to_tokens(end)!r}, which becomes the end token")
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # A padding token that is also the end token deletes real end tokens wherever a mask is made from ids: take an unused one
        spare = [t for t in tokenizer.get_added_vocab() if "pad" in t.lower() or "reserved" in t.lower()]
        spare = [t for t in spare if tokenizer.convert_tokens_to_ids(t) != tokenizer.eos_token_id]
        tokenizer.pad_token = spare[0] if spare else "<|pad|>"  # a token that the vocabulary lacks is added to it
        say(f"{name}: padding was {'missing' if not spare else 'unset or the end token'}; {tokenizer.pad_token!r} pads from now on")
    return tokenizer


def _end_of_turn(tokenizer, name) -> int:
    """The id of the first special token after the text of an assistant turn, as the chat template writes it; else the end token."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    turn = tokenizer.apply_chat_template([question, answer], tokenize=False)
    after = tokenizer(turn[turn.rindex("b") + 1 :], add_special_tokens=False)["input_ids"] if "b" in turn else []
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    end = next((i for i in after if i in special), tokenizer.eos_token_id)
    if end is None:
        raise InputError(f"the tokenizer of {name} has no end token and its chat template writes none: a response could not end")
    return end


def load_policy(name: str, tokenizer, *, seed: int = 0, attn_implementation: str = "sdpa", gradient_checkpointing: bool = False):
    """A causal LM in fp32 with dropout off and the method `token_logprobs`. Real weights on rank 0, none ("meta") on other ranks:
    pass it to dist.shard next. seed: of the random weights of `tiny`.

    Raises InputError for models whose logits are not simply the unembedding of the last hidden state."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == "tiny":
        model = tiny.model(seed)
        model.set_attn_implementation(attn_implementation)
    else:
        folder = find_model(name)
        config = AutoConfig.from_pretrained(folder)
        for key, value in config.to_dict().items():
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)  # with dropout the ratio of new to old probabilities is not 1 before the first update
        if not dist.is_main():
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation=attn_implementation)
    text = model.config.get_text_config()
    for key, neutral in (("final_logit_softcapping", None), ("logit_scale", 1.0), ("logits_scaling", 1.0)):
        if getattr(text, key, neutral) not in (None, neutral):
            raise InputError(f"{name} ({text.model_type}) changes its logits after the unembedding ({key}), which token_logprobs does not do")
    _fit_embeddings(model, len(tokenizer))
    for settings in (model.config, getattr(model, "generation_config", None)):
        if settings is not None:
            settings.pad_token_id, settings.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.token_logprobs = types.MethodType(token_logprobs, model)
    model.forward_methods = ("token_logprobs",)  # dist.shard makes these gather sharded weights as forward does
    return model.train()


def _fit_embeddings(model, n_tokens):
    """Add rows to the embeddings for tokens added to the vocabulary, as the mean of the others: a new token is then as likely as an
    average one, and the probabilities of the rest hardly move. A larger table (padded for speed) stays as it is."""
    old = model.get_input_embeddings().weight.shape[0]
    if n_tokens <= old:
        return
    model.resize_token_embeddings(n_tokens, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[old:] = module.weight[:old].mean(0)


@torch.no_grad()
def check_packing(model):
    """Compare two packed documents with the second one alone. InputError if the first one shows through: transformers separates packed
    documents by their positions, but not in every model. Every rank must call it."""
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    ids = torch.tensor([[(7 * i + 3) % vocabulary for i in range(12)]], device=device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]], device=device)
    packed = model.token_logprobs(ids, torch.ones(1, 11, dtype=torch.bool, device=device), position_ids=positions)[:, 5:]
    alone = model.token_logprobs(ids[:, 5:], torch.ones(1, 6, dtype=torch.bool, device=device))
    if not (packed - alone).abs().max() < (1e-3 if model.compute_dtype == torch.float32 else 0.2):
        raise InputError(f"{model.config.model_type} lets packed documents see each other (by {(packed - alone).abs().max():.2g} nats): use --no-packing")


# -- log probabilities -----------------------------------------------------------------------------------------------------------------
def token_logprobs(model, input_ids, action_mask, position_ids=None, temperature: float = 1.0, entropy: bool = False):
    """log pi(token t+1 | tokens <= t) for every action, computed only where action_mask is True.

    input_ids: (B, T), right-padded: under causal attention a token never sees the padding after it, so no attention mask is needed.
    action_mask: (B, T-1) bool, True where token t+1 is an action. position_ids: (B, T) or None; where they begin again at 0 a new
    packed document begins, which sees nothing of the ones before it. temperature: divides the logits.
    Returns (B, T-1) fp32 in nats, 0 where action_mask is False; with entropy=True also the entropy of each of these distributions
    (nats, no gradient). Call it as a method of the sharded model, `model.token_logprobs(...)`, so that the weights are gathered.

    The unembedding runs on chunks of the kept positions, and again in backward: a (B, T, V) tensor of logits never exists."""
    with torch.autocast(input_ids.device.type, getattr(model, "compute_dtype", torch.float32), enabled=_autocast(model)):
        hidden = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        # A rank with no action in its rows still takes part in every gradient reduction: keep one position, at weight 0
        keep = action_mask if action_mask.any() else torch.zeros_like(action_mask).index_fill_(1, action_mask.new_zeros(1, dtype=torch.long), True)
        hidden, targets = hidden[:, :-1][keep], input_ids[:, 1:][keep]  # (n, H), (n,)
        head = model.get_output_embeddings()
        size = max(1, LOGITS_IN_MEMORY // head.weight.shape[0])
        chunks = []
        for h, y in zip(hidden.split(size), targets.split(size)):
            recompute = torch.is_grad_enabled()
            chunks.append(checkpoint(_chunk, head, h, y, temperature, entropy, use_reentrant=False) if recompute else _chunk(head, h, y, temperature, entropy))
    logprobs, entropies = (torch.cat(parts) for parts in zip(*chunks))
    scale = 1.0 if keep is action_mask else 0.0
    empty = torch.zeros(action_mask.shape, dtype=torch.float32, device=input_ids.device)
    logprobs = empty.masked_scatter(keep, logprobs * scale)
    return (logprobs, empty.masked_scatter(keep, entropies * scale)) if entropy else logprobs


def _chunk(head, hidden, targets, temperature, entropy):
    logits = head(hidden).float() / temperature  # (n, V), fp32 from here on: a bf16 log-softmax is off by 1e-2
    log_z = logits.logsumexp(-1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - log_z
    if not entropy:
        return logprobs, log_z.detach()
    with torch.no_grad():  # H = log Z - sum_v p_v logit_v
        return logprobs, log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1)


def _autocast(model) -> bool:
    """Sharded models compute in compute_dtype by FSDP's own policy; a single process casts here."""
    return dist.world_size() == 1 and getattr(model, "compute_dtype", torch.float32) != torch.float32
