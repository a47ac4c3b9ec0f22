"""Load a policy or a scalar head, and the tokenizer; log probabilities of tokens without a tensor of all
logits; scores.

A name is `tiny` (common/tiny.py), a run directory of one of the scripts, a folder written by save_pretrained,
or a name on the hub.
"""

import functools
import re
import sys
import types
from pathlib import Path

import jinja2
import torch
from torch.utils.checkpoint import checkpoint

from common import dist, losses, tiny
from common.batches import collate, my_micro_batches, n_response_tokens, response_mask
from common.errors import InputError

SPARE = re.compile(r"^\W*(finetune_right_)?pad(ding)?(_id)?\W*$|reserved", re.I)  # tokens kept for such a use
CUT_TEMPLATE = re.compile(  # of an exported scorer: read_at_end_token
    r"^\{% set dialogue %\}(.*)\{% endset %\}\{\{ dialogue if .* \}\}", re.S
)
SCALED_LOGITS = {  # what models do to logits after the unembedding, and when it changes nothing
    "final_logit_softcapping": None, "softcap": None, "logit_scale": 1.0, "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0, "output_multiplier": 1.0,
}  # fmt: skip
LOGITS_IN_MEMORY = 2**24  # elements of a chunk of logits on a CPU, 64 MB in fp32, whatever B, T and V are


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


def load_tokenizer(name: str, chat_template: str | None = None, quiet=False):
    """The tokenizer of a model, ready for chat: it has a chat template, its end token is the one that ends
    the template's assistant turn, and its padding token is another one. What had to be changed is printed.

    chat_template: a file with a jinja template that replaces the tokenizer's own. quiet: print nothing."""
    from transformers import AutoTokenizer

    try:
        tokenizer = tiny.tokenizer() if name == "tiny" else _from_hub(AutoTokenizer, name)
    except InputError as error:
        raise InputError(f"--model {error}") from None
    say = print if dist.is_main() and not quiet else lambda *_: None
    if chat_template:
        if not Path(chat_template).is_file():
            raise InputError(f"--chat-template {chat_template}: there is no such file")
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    elif isinstance(tokenizer.chat_template, str):  # of a model that was trained here
        tokenizer.chat_template = CUT_TEMPLATE.sub(r"\1", tokenizer.chat_template)
    if not tokenizer.chat_template:
        raise InputError(f"{name} has no chat template: give one with --chat-template FILE (jinja)")
    end = _end_of_turn(tokenizer, name)
    if end != tokenizer.eos_token_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        say(f"{name}: the chat template ends a turn with {tokenizer.eos_token!r}, so that is the end token")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # If padding were the end token, a mask made from ids anywhere would drop real end tokens
        spare = [t for t in tokenizer.get_added_vocab() if SPARE.search(t) and t != tokenizer.eos_token]
        spare += _never_unknown(tokenizer)
        tokenizer.add_special_tokens({"pad_token": spare[0] if spare else "<|pad|>"})
        say(f"{name}: padding was unset or the end token; from now on it is {tokenizer.pad_token!r}")
    return tokenizer


def _never_unknown(tokenizer) -> list[str]:
    """The token for unknown words, where no word is unknown because bytes spell it: Llama 2 has no other to
    pad with, and one more would make 32,001, which no matrix product likes."""
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id):
        return []
    no_character = tokenizer("\U0010fffd", add_special_tokens=False)["input_ids"]
    return [] if unknown in no_character else [tokenizer.unk_token]


def _after_answer(tokenizer) -> str:
    """What the chat template writes after an assistant's text at the end of a dialogue."""
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "the answer"}]
    return tokenizer.apply_chat_template(turns, tokenize=False).rpartition("the answer")[2]


def _end_of_turn(tokenizer, name) -> int:
    """The first special token after an assistant turn's text in the chat template; else the end token."""
    try:
        after = _after_answer(tokenizer)
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
    from transformers import AutoModelForCausalLM

    if name == "tiny":
        model = tiny.model(seed)
    else:
        check_causal_lm(name)
        config = _read_config(name)
        model = _read(AutoModelForCausalLM, name, config)
    _fit_embeddings(model, len(tokenizer))
    sampling = model.generation_config
    if any(getattr(sampling, key, None) is not None for key in ("temperature", "top_p", "top_k")):
        sampling.do_sample = True  # transformers refuses to save these without it, hours from now
    for settings in (model.config, sampling):  # as the tokenizer has them now
        settings.pad_token_id, settings.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    others = [token for token in _own_end_tokens(name) if token != tokenizer.eos_token_id]
    if others:  # Llama 3 and Qwen end with one of two tokens
        sampling.eos_token_id = [tokenizer.eos_token_id, *others]
    return _ready(model, (token_logprobs, logprobs_at, next_token_logprobs), gradient_checkpointing)


def _own_end_tokens(name) -> list[int]:
    """The tokens at which a model's own generation_config has it stop, if it lists several."""
    from transformers import GenerationConfig

    try:
        ends = None if name == "tiny" else GenerationConfig.from_pretrained(find_model(name)).eos_token_id
    except OSError:  # it has none
        ends = None
    return ends if isinstance(ends, list) else []


def load_scorer(name, tokenizer, n_outputs, gradient_checkpointing=False, seed=0):
    """A model with a linear head of n_outputs on its last hidden states, in place of the unembedding: a
    transformers *ForSequenceClassification with the method `head_outputs`. Loaded like load_policy's.

    name: a causal LM, whose body it gets, with a new head (normal, deviation 1 / sqrt(hidden size + 1), no
      bias: first scores of about unit size); or a model of this kind already, head included. seed: of a new
      head. InputError if the model has a head of another kind or size."""
    from transformers import AutoModelForSequenceClassification

    policy = tiny.model(seed) if name == "tiny" else None
    config = policy.config if policy else _read_config(name)
    kind, outputs = _kind(config), config.num_labels
    if "ForSequenceClassification" not in kind:
        config.id2label = dict(enumerate(("reward", "expected_reward")[:n_outputs]))  # and so num_labels
        config.label2id = {label: i for i, label in config.id2label.items()}
    elif outputs != n_outputs:
        kinds = {1: "a reward model (1 output)", 2: "an advantage model (2 outputs)"}
        wanted = f"wanted {kinds[n_outputs]} or a causal language model"
        raise InputError(f"{name} is {kinds.get(outputs, f'a classifier of {outputs} labels')}, {wanted}")
    elif n_outputs == 2 and not hasattr(config, "advantage_model"):
        raise InputError(f"{name} is a classifier of 2 labels that advantage_model.py did not write")
    config.problem_type = "regression"  # so that no pipeline applies a sigmoid
    model = _read(AutoModelForSequenceClassification, name, config)
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise InputError(f"{name}: {type(model).__name__} has no linear head named score")
    if "ForSequenceClassification" not in kind and dist.is_main():
        if policy:
            model.base_model.load_state_dict(policy.base_model.state_dict())
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            size = model.score.weight.shape[1]
            model.score.weight.normal_(0, (size + 1) ** -0.5, generator=generator)
    _fit_embeddings(model, len(tokenizer))
    model.config.pad_token_id, model.config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    return _ready(model, (head_outputs,), gradient_checkpointing)


def is_causal_lm(name) -> bool:
    """False for a model with a scalar head, or another kind."""
    return name == "tiny" or any(k in _kind(_read_config(name)) for k in ("ForCausalLM", "LMHeadModel"))


def is_preference_model(name) -> bool:
    """True of a causal LM that common/train_pairwise.py trained."""
    return is_causal_lm(name) and name != "tiny" and hasattr(_read_config(name), "preference_model")


def n_outputs(name) -> int:
    """1 of a reward model, 2 of an advantage model; InputError for any other model."""
    config = None if name == "tiny" else _read_config(name)
    if config is None or "ForSequenceClassification" not in _kind(config):
        kind = "a causal language model" if config is None else f"a {_kind(config)}"
        if hasattr(config, "preference_model"):
            kind = "a pairwise preference model, which scores no response alone"
        raise InputError(f"{name} is {kind}, wanted a run of reward.py or advantage_model.py")
    if config.num_labels > 2:
        wanted = "wanted a run of reward.py or advantage_model.py"
        raise InputError(f"{name} is a classifier of {config.num_labels} labels, {wanted}")
    return config.num_labels


def sft_model(model, given=None) -> str | None:
    """The causal LM that a reward or advantage model is compared with: `given`, or, if nothing is, runs/sft
    for the model tiny and else `model` itself, if it is one."""
    if given or model == "tiny":
        return given or "runs/sft"
    return model if is_causal_lm(model) else None


def check_causal_lm(name, tokenizer=None, chat_template=None):
    """InputError unless there is a causal language model of this name whose logits are simply the unembedding
    of its last hidden state, and, with `tokenizer`, whose own tokenizer, loaded with the same chat_template,
    has the same vocabulary."""
    if not is_causal_lm(name):
        raise InputError(f"{name} is a {_kind(_read_config(name))}, wanted a causal language model")
    config = None if name == "tiny" else _read_config(name)
    for key, neutral in SCALED_LOGITS.items() if config else ():
        if getattr(config.get_text_config(), key, None) not in (None, neutral):
            raise InputError(f"{name}: {config.model_type} has {key}, which token_logprobs does not know")
    if tokenizer and load_tokenizer(name, chat_template, quiet=True).get_vocab() != tokenizer.get_vocab():
        raise InputError(f"{name} has another vocabulary than --model, so their tokens mean different things")


def check_room(length: int, name, config=None):
    """InputError if a model has fewer positions than `length` tokens, --max-length. config: its own, or None:
    of the model of this name."""
    config = config or (tiny.model().config if name == "tiny" else _read_config(name))
    room = n_positions(config)
    if length > room:
        longrope = room < getattr(config.get_text_config(), "max_position_embeddings", room)
        why = ", after which longrope turns a whole batch to other frequencies" if longrope else ""
        raise InputError(f"--max-length {length}: {name} has {room} positions{why}")


def n_positions(config) -> int:
    """How many tokens a row may have. Of longrope the original length: a longer row turns its whole batch to
    other rotary frequencies."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", sys.maxsize)


def identity(name) -> list:
    """What changes when a model of this name does: of a folder, its files' sizes and times."""
    folder = Path(find_model(name))
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    return [name, [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]]


def _kind(config):
    return (config.architectures or ["ForCausalLM"])[0]


def _read_config(name):
    from transformers import AutoConfig

    config = _from_hub(AutoConfig, name)
    for key, value in config.to_dict().items():  # with dropout, new and old probabilities never agree
        # PhiMoE's noise is a threshold too, without which it routes in another way (_ready refuses it)
        jitter = key == "router_jitter_noise" and config.model_type != "phimoe"
        if ("dropout" in key or key.endswith("pdrop") or jitter) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def _from_hub(auto_class, name):
    """auto_class.from_pretrained; InputError for what is not there, or not known to transformers."""
    try:
        return auto_class.from_pretrained(find_model(name), trust_remote_code=False)
    except OSError as error:  # not on the hub, no network, or files missing in the folder
        raise InputError(f"{name}: {error}") from None
    except ValueError as error:
        own_code = "needs code of its own (trust_remote_code), which is not run here"
        why = own_code if "trust_remote_code" in str(error) else " ".join(str(error).split())
        raise InputError(f"{name}: {why}") from None


def _read(auto_class, name, config):
    """The model in fp32, weights on rank 0 only."""
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}  # takes the masks of sampler and trees
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # that a head is new is what load_scorer says
    try:
        if dist.is_main() and name != "tiny":
            return auto_class.from_pretrained(find_model(name), config=config, **options)
        with torch.device("cpu" if dist.is_main() else "meta"):
            return auto_class.from_config(config, **options)
    except ValueError as error:  # no model of this kind, or none with sdpa
        raise InputError(f"{name}: {error}") from None
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def _ready(model, methods, gradient_checkpointing):
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for method in methods:
        setattr(model, method.__name__, types.MethodType(method, model))
    model.forward_methods = tuple(method.__name__ for method in methods)  # dist.shard has these gather too
    if dist.is_main():
        _check_repeatable(model.train())
    return model.train()


@torch.no_grad()
def _check_repeatable(model):
    """InputError if two forwards in training mode differ: then new and old probabilities never agree."""
    n, vocabulary = min(64, n_positions(model.config)), model.config.get_text_config().vocab_size
    ids = torch.arange(n)[None] % vocabulary
    once, twice = (model.base_model(input_ids=ids, use_cache=False).last_hidden_state for _ in range(2))
    if not torch.allclose(once, twice, rtol=1e-3, atol=1e-3 * once.abs().max().item()):
        kind = model.config.model_type
        raise InputError(f"{kind}: two forwards in training mode differ (its experts are drawn, for one)")


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
            if module is not None:  # a scalar head has taken the unembedding's place
                module.weight[old:] = module.weight[:old].mean(0)


@torch.no_grad()
def check_packing(model):
    """InputError if, with two documents in a row, what the first one says changes the second: transformers
    keeps packed documents apart by their positions, but not in every model. Every rank must call it."""
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]], device=device)
    firsts = [[k * (i + 1) % vocabulary for i in range(5)] for k in (3, 4)]
    ids = [torch.tensor([[*first, *(i % vocabulary for i in range(7))]], device=device) for first in firsts]

    def change(positions):  # of the second document's figures, by what the first one says
        if hasattr(model, "head_outputs"):
            first, second = (model.head_outputs(x, packed.nonzero().T[:, 4:], positions) for x in ids)
        else:
            first, second = (model.token_logprobs(x, packed[:, 1:] > 0, positions)[:, 5:] for x in ids)
        return (first - second).abs().max().item()

    leak, as_one = change(packed), change(torch.arange(12, device=device)[None])
    if not leak <= 0.1 * as_one:  # rounding alone may change a little, where experts take tokens of both
        kind = model.config.model_type
        raise InputError(f"{kind}: packed documents see each other (by {leak:.2g}), use --no-packing")


@torch.no_grad()
def check_shared_prompt(model, max_length=None):
    """InputError if responses that share their prompt in one row get other scores, or log probabilities, than
    in rows of their own: some models read neither 4-D masks nor positions. max_length: of a prompt with one
    response, which a window of attention must hold; None: no window will do. Every rank must call it."""
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    prompt, first, second = ([(k * i + 1) % vocabulary for i in range(k)] for k in (3, 4, 5))
    branch = torch.tensor([0] * 3 + [1] * 4 + [2] * 5, device=device)
    mask = ((branch == 0) | (branch == branch[:, None])).tril()[None, None]
    row = torch.tensor([prompt + first + second], device=device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7]], device=device)
    ends = torch.tensor([[0, 0], [6, 11]], device=device)
    rows = torch.tensor([prompt + first + [0], prompt + second], device=device)
    alone_ends = torch.tensor([[0, 1], [6, 7]], device=device)
    if hasattr(model, "head_outputs"):
        shared, alone = model.head_outputs(row, ends, positions, mask), model.head_outputs(rows, alone_ends)
    else:
        targets = torch.tensor([1, 2], device=device)
        shared = model.logprobs_at(row, ends, targets, positions, mask)
        alone = model.logprobs_at(rows, alone_ends, targets)
    close = 1e-4 if getattr(model, "compute_dtype", torch.float32) == torch.float32 else 0.05
    # A window of attention would show in long rows only
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    too_narrow = window and (max_length is None or window < max_length)
    if too_narrow or not (shared - alone).abs().max() < close * (1 + alone.abs().max()):
        raise InputError(f"{config.model_type}: responses cannot share a prompt, use --no-share-prompt")


def set_safety_gate(model, gate: dict | None):
    """What scorers.fit_safety_gate fitted is kept in model/config.json, for ppo.py; None: nothing was, and
    what a first stage had fitted is of other scores."""
    vars(model.config).pop("safety_gate", None)
    if gate:
        model.config.safety_gate = gate


# -- the export ------------------------------------------------------------------------------------
def export_dtype(start, save_dtype: str | None) -> torch.dtype:
    """What model/ is written in: --save-dtype, or the dtype of `start`, the model that the run began from."""
    if save_dtype:
        return getattr(torch, save_dtype)
    dtype = None if start == "tiny" else _read_config(start).dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def report_export(folder, start, seed):
    """Print where the model is, its dtype, and the share of its weights that differ from those of `start`,
    which training began from (seed: as load_policy's). Call it on rank 0."""
    begun, written = _weights_in_files(start, seed), _weights_in_files(folder, seed)
    n_changed = n_weights = 0
    for name, read in written.items():
        name = name if name in begun else name.partition(".")[2]  # some files have no prefix of the body
        if name in begun:
            before, after = torch.atleast_1d(begun[name](), read())
            before, after = before[: len(after)], after[: len(before)]  # new tokens may have added rows
            n_changed += (before.to(after.dtype) != after).sum().item()
            n_weights += after.numel()
    dtype = str(_read_config(folder).dtype).removeprefix("torch.")
    line = f"wrote {folder} ({dtype})"
    if n_weights:
        line += f": {100 * n_changed / n_weights:.3g} % of the weights differ from {start}'s"
        if n_changed < n_weights / 2 and dtype != "float32":
            line += "; rounding may have undone the other updates: --save-dtype float32 keeps them"
    print(line)


def _weights_in_files(name, seed):
    """{name of a weight: a function that reads it}; {} of a model that has no safetensors files here."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    if name == "tiny":
        weights = tiny.model(seed).state_dict()
        return {key: functools.partial(weights.get, key) for key in weights}
    try:
        config = cached_file(find_model(str(name)), "config.json", local_files_only=True)
    except (OSError, InputError):
        return {}
    files = [safe_open(path, "pt") for path in sorted(Path(config).parent.glob("*.safetensors"))]
    return {key: functools.partial(file.get_tensor, key) for file in files for key in file.keys()}


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
    with _computing(model, input_ids):
        body = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        hidden, targets = body.last_hidden_state[:, :-1][action_mask], input_ids[:, 1:][action_mask]
        found = _unembed(model, hidden, targets, temperature, entropy)
    zeros = torch.zeros(action_mask.shape, device=input_ids.device)
    logprobs, entropies = (zeros.masked_scatter(action_mask, x) for x in found)
    return (logprobs, entropies) if entropy else logprobs


def logprobs(model, batch, temperature=1.0, entropy=False):
    """token_logprobs of a batches.Batch: (B, T-1), and with entropy=True a second one."""
    return model.token_logprobs(
        batch.input_ids, batch.action_mask, batch.position_ids, temperature=temperature, entropy=entropy
    )


def logprobs_and_entropies(model, batch, temperature=1.0):
    return logprobs(model, batch, temperature, entropy=True)


def state_values(model, batch):
    """V of the state before each response token, (B, T-1)."""
    return values(model, batch.input_ids, batch.action_mask, batch.position_ids)


@torch.no_grad()
def per_token(forward, model, *options, plan, micro_batch_size) -> list[torch.Tensor]:
    """What forward(model, batch, *options) gives at each response token, one or several (B', T-1), as (B, R)
    tensors on every rank: row i is that of the document with the number i of B, R the longest response, 0
    behind shorter ones.
    plan: lists of blocks, each of which is divided among ranks and micro-batches as an optimiser step's."""
    documents = [document for blocks in plan for block in blocks for document in block]
    mask, results = response_mask(sorted(documents, key=lambda document: document.number)), []
    for blocks in plan:
        for batch in my_micro_batches(blocks, model, micro_batch_size):
            outputs = forward(model, batch, *options)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            results = results or [torch.zeros(mask.shape) for _ in outputs]
            rows = [document.number for document in batch.documents]
            for result, output in zip(results, outputs):
                mine = torch.zeros(len(rows), mask.shape[1])
                result[rows] = mine.masked_scatter(mask[rows], output[batch.action_mask].float().cpu())
    return [dist.sum_of_ranks(result) for result in results]  # one rank filled each row, the others have 0


def freeze(model, n_layers):
    """The first decoder layers stay as they are."""
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])]
    for layer in layers[:n_layers]:
        layer.requires_grad_(False)
    return model


def logprobs_at(model, input_ids, where, targets, position_ids=None, attention_mask=None):
    """log pi(target | what is seen at a place), for rows in which responses share a prompt.

    input_ids: (B, T). where: (2, n), rows and columns of the tokens that see all before a target. targets:
    (n,) token ids. position_ids, attention_mask: as head_outputs takes them. Returns (n,) fp32, nats. Call it
    as a method, like token_logprobs."""
    with _computing(model, input_ids):
        options = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": False}
        hidden = model.base_model(input_ids=input_ids, **options).last_hidden_state
        return _unembed(model, hidden[where[0], where[1]], targets)[0]


def _unembed(model, hidden, targets, temperature=1.0, entropy=False):
    """(log probabilities, entropies) of (n, H) hidden states and (n,) targets, chunk by chunk. On a rank
    without loss n is 0: empty tensors still connect every weight to the gradient."""
    head, parts = model.get_output_embeddings(), []
    # Chunks' gradients of the unembedding are summed in bf16 on an accelerator: fewer chunks, less rounding
    elements = LOGITS_IN_MEMORY * (1 if head.weight.device.type == "cpu" else 8)
    size = max(1, elements // head.weight.shape[0])
    again = torch.is_grad_enabled() and len(targets) > size  # a single chunk may stay in memory
    for chunk in zip(hidden.split(size), targets.split(size)):
        inputs = (head, *chunk, temperature, entropy)
        parts.append(checkpoint(_chunk, *inputs, use_reentrant=False) if again else _chunk(*inputs))
    return [torch.cat(part) for part in zip(*parts)]


@torch.no_grad()
def seq_logprobs(model, documents, micro_batch_size, temperature=1.0) -> list[float]:
    """log pi(y | x) in nats, a sum over the response's tokens, of every document, on every rank; every rank
    must call it. temperature: divides the logits."""
    found, numbered = [], list(enumerate(documents))
    for some in dist.my_batches(numbered, micro_batch_size, lambda item: len(item[1].ids)):
        batch = collate([[document] for _, document in some], model.config.pad_token_id, model.device)
        sums = logprobs(model, batch, temperature).double().sum(1)
        found += zip((i for i, _ in some), sums.tolist())
    return [x for _, x in sorted(dist.gather(found))]


def next_token_logprobs(model, input_ids, where, before=()):
    """log pi of every token that may follow some tokens. input_ids: (B, T), right-padded; where: (2, n), the
    rows and columns of these tokens; before: token ids in front of every row, which are run once. Returns
    (n, V) fp32, nats. Call it as a method, like token_logprobs. The head computes in fp32 whatever the body
    does: in bf16 the logits of two likely tokens are often the same."""
    with _computing(model, input_ids):
        options = {"use_cache": False}
        if before:
            first = torch.tensor([before], device=input_ids.device)
            kept = model.base_model(input_ids=first, use_cache=True).past_key_values
            kept.batch_repeat_interleave(len(input_ids))
            options = {"past_key_values": kept, "use_cache": True}
        hidden = model.base_model(input_ids=input_ids, **options).last_hidden_state
    head = model.get_output_embeddings()
    bias = None if head.bias is None else head.bias.float()
    logits = torch.nn.functional.linear(hidden[where[0], where[1]].float(), head.weight.float(), bias)
    return logits.log_softmax(-1)


@torch.no_grad()
def mean_nll(model, blocks, micro_batch_size) -> float:
    """Mean negative log likelihood of the response tokens of blocks (data.make_blocks), in nats, over all
    ranks. Every rank must call it."""
    nll_sum = 0.0
    for batch in my_micro_batches(blocks, model, micro_batch_size):
        nll_sum -= losses.masked_sum(logprobs(model, batch), batch.action_mask).item()
    return dist.all_sum(nll_sum)[0] / n_response_tokens(blocks)


def _computing(model, input_ids):
    """Autocast to the compute dtype, bf16 on a GPU. A model that FSDP shards has FSDP cast."""
    dtype = getattr(model, "compute_dtype", torch.float32)
    if dtype == torch.float16 and torch.is_grad_enabled():
        raise InputError("training in fp16 needs a loss scaler, which is not here: bf16 or fp32")
    enabled = dtype != torch.float32 and not dist.is_sharded(model)
    return torch.autocast(input_ids.device.type, dtype, enabled=enabled)


def _chunk(head, hidden, targets, temperature, entropy):
    logits = head(hidden).float()  # (n, V); a log-softmax in bf16 is off by 1e-2
    logits = logits if temperature == 1 else logits / temperature
    logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")  # one fused pass
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.no_grad():
        all_logprobs = logits.log_softmax(-1)
        return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


# -- scores ----------------------------------------------------------------------------------------
def head_outputs(model, input_ids, where, position_ids=None, attention_mask=None):
    """The scalar head's outputs at some tokens.

    input_ids: (B, T), right-padded. where: (2, n), rows and columns of the tokens to read.
    position_ids, attention_mask: (B, T) and (B, 1, T, T) bool, True where a query may look, for rows in which
      responses share a prompt (preferences.collate); None: plain causal rows.
    Returns (n, number of outputs) in fp32. Call it as a method, `model.head_outputs(...)`: dist.shard has
      that gather the weights. The head computes in fp32 whatever the body does: rounded scores tie."""
    with _computing(model, input_ids):
        options = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": False}
        hidden = model.base_model(input_ids=input_ids, **options).last_hidden_state
    return model.score(hidden[where[0], where[1]].float())


def rewards_and_expected(model, batch):
    """(r at the end of every response, (responses,); the second output at the end of every prompt,
    (comparisons,)) of a batches.ComparisonBatch, by an advantage model."""
    where = torch.cat([batch.response_ends, batch.prompt_ends], 1)
    outputs = model.head_outputs(batch.input_ids, where, batch.position_ids, batch.attention_mask)
    n = batch.response_ends.shape[1]
    return outputs[:n, 0], outputs[n:, 1]


def scores_of(model, batch):
    """The score of every response of a batches.ComparisonBatch, (responses,): r(x, y) of a reward model; of
    an advantage model a(x, y), all ratios taken as 1."""
    if model.config.num_labels == 1:
        outputs = model.head_outputs(
            batch.input_ids, batch.response_ends, batch.position_ids, batch.attention_mask
        )
        return outputs[:, 0]
    rewards, expected = rewards_and_expected(model, batch)
    sizes = torch.tensor(batch.sizes, dtype=torch.long, device=rewards.device)  # also of no comparison
    return advantages(model, rewards, expected.repeat_interleave(sizes))


def score(model, input_ids, response_mask):
    """The score of each row's response, by a reward model or an advantage model.

    input_ids: (B, T), right-padded. response_mask: (B, T) bool, True for response tokens, the end token
      included. The mask says where things are, never the ids: a padding token may equal the end token.
    Returns (B,) fp32, reward units: of a reward model r(x, y), read at the response's last token; of an
    advantage model a(x, y) with the ratios to other policies taken as 1, which is (1 - K/N)(r - e), with e(x)
    read at the prompt's last token. ValueError if a row has no response or no prompt."""
    if not response_mask.any(1).all() or response_mask[:, 0].any():
        raise ValueError("score: a row has no response token, or no prompt before it")
    columns = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = (response_mask * columns).argmax(1)
    before = response_mask.int().argmax(1) - 1  # the prompt's last token
    rows = torch.arange(len(last), device=last.device)
    if model.config.num_labels == 1:
        return model.head_outputs(input_ids, torch.stack([rows, last]))[:, 0]
    where = torch.stack([rows.repeat(2), torch.cat([last, before])])
    rewards, expected = model.head_outputs(input_ids, where).split(len(rows))
    return advantages(model, rewards[:, 0], expected[:, 1])


def read_at_end_token(model, tokenizer):
    """Before a scorer that was trained here is saved: its config says that it is read at the end token, and
    what its chat template writes after an answer's end token is cut, for transformers' own classifier, and so
    a pipeline, reads the last token of the text. load_tokenizer gives the template back whole."""
    model.config.read_at = "end_token"
    rest = _after_answer(tokenizer).partition(tokenizer.eos_token)[2]
    if rest and isinstance(tokenizer.chat_template, str):
        template = tokenizer.chat_template.removesuffix("\n")  # one at the very end jinja leaves out
        newline = tokenizer.chat_template[len(template) :]
        cut = f"{{{{ dialogue if add_generation_prompt else dialogue.removesuffix({rest!r}) }}}}"
        tokenizer.chat_template = f"{{% set dialogue %}}{template}{{% endset %}}{cut}{newline}"


def end_of_scored(model, tokenizer) -> list[int]:
    """The tokens after a response's text of which the last one is where the score is read: the end token, of
    a model that was trained here; of any other one all that the chat template writes there."""
    if getattr(model.config, "read_at", None) == "end_token":
        return [tokenizer.eos_token_id]
    return tokenizer(_after_answer(tokenizer), add_special_tokens=False)["input_ids"]


def values(model, input_ids, action_mask, position_ids=None):
    """V of the state before each action, by a model with one output: (B, T-1) fp32, 0 where action_mask is
    False. input_ids: (B, T), right-padded; action_mask: (B, T-1) bool; position_ids: as token_logprobs takes
    them. Index t is read at token t, which sees the tokens up to t and not the action, token t+1."""
    found = model.head_outputs(input_ids, action_mask.nonzero().T, position_ids)[:, 0]
    return torch.zeros(action_mask.shape, device=input_ids.device).masked_scatter(action_mask, found)


def advantages(model, rewards, expected_rewards):
    """a(x, y) of an advantage model where the ratios to other policies are unknown and so 1 (eq. 8)."""
    n_policies, n_others = (model.config.advantage_model[key] for key in ("n_policies", "n_others"))
    ratios = rewards.new_ones(*rewards.shape, n_others)
    return losses.advantage_score(rewards, expected_rewards, ratios=ratios, n_policies=n_policies)


def response_logprobs(model, batch) -> torch.Tensor:
    """log pi(y | x), a sum over y's tokens (nats), of every response of a batch, comparison by comparison:
    (n_responses,), gradient flows."""
    device = batch.input_ids.device
    texts = [ids for c in batch.comparisons for ids in (*c.response_ids, *c.samples)]
    targets = torch.cat([torch.zeros(0, dtype=torch.long), *texts]).to(device)
    sizes, lengths = (torch.tensor(x, dtype=torch.long) for x in (batch.sizes, [len(ids) for ids in texts]))
    begin = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    within = (torch.arange(len(begin)) - begin).to(device)  # a token's place in its response
    owner = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
    prompt = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)  # of each response
    (rows, ends), before = batch.response_ends, batch.prompt_ends[1][prompt]
    # A response's first token comes after the prompt's last one, which may stand far before it
    columns = torch.where(within == 0, before[owner], (ends - lengths.to(device))[owner] + within)
    where = torch.stack([rows[owner], columns])
    logprobs = model.logprobs_at(batch.input_ids, where, targets, batch.position_ids, batch.attention_mask)
    return logprobs.new_zeros(len(lengths)).index_add(0, owner, logprobs)
