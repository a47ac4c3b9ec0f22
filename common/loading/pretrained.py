"""Load tokenizers, policies and models with a scalar head by name, ready to train; prepare their export.

A name is `tiny` (common/data/tiny.py), a run directory, a folder of save_pretrained, or a name on the hub.
"""

import functools
import gc
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import torch
from huggingface_hub import try_to_load_from_cache

from common import dist, models, sampler
from common.errors import InputError
from common.data import files, tiny
from common.loading import checks, lora, tensor_parallel

# Names of tokens that can serve as padding
PADDING_NAMES = re.compile(r"^\W*(finetune_right_)?pad(ding)?(_id)?\W*$|reserved", re.I)
# The chat template of an exported scorer, as read_at_end_token writes it
CUT_TEMPLATE = re.compile(r"(?s)^\{% set dialogue %\}(?:\n(?=\n))?(.*)\{% endset %\}\{\{ dialogue if .* \}\}")
TRAINED_HERE = (
    "a run of reward.py or advantage_model.py (for a preference model: common.programs.pairwise:oracle=RUN)"
)
# Names of weights in a multimodal model -> in its text part
TEXT_PART = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}


def find_model(name: str) -> str:
    """Return the folder or hub name that `name` refers to; a run directory becomes its model/.

    Raises InputError if the run has not finished, or if there is no model at this path."""
    path = Path(name)
    if name == "tiny" or (path / "config.json").exists():
        return name
    if (path / "summary.json").exists() and (path / "model" / "config.json").exists():
        return str(path / "model")
    if (path / "args.json").exists():
        raise InputError(f"{name} is a run that has not finished. Run its command with --resume first")
    if path.exists():
        raise InputError(f"{name} has no config.json: neither a model nor a run (merge PEFT adapters first)")
    if path.is_absolute() or name.startswith((".", "runs/")) or name.count("/") > 1 or "\\" in name:
        script = Path(__file__).parents[2] / f"{path.name}.py"
        mend = f"Create it from your model by `python {script.name}`" if script.exists() else "Check the path"
        raise InputError(f"there is no {name}. {mend} (hub names look like organisation/model)")
    return name


def load_tokenizer(name: str, chat_template: str | None = None, quiet=False):
    """Load the tokenizer of a model and make it ready for chat; print the changes.

    It then has a chat template, its end-of-sequence token is the one that ends the template's assistant turn,
    and its padding token is a different one.

    chat_template: a file with a jinja template that replaces the tokenizer's own.
    quiet: print nothing.

    Raises InputError if there is no chat template, or no token that ends a turn, or if the one that
    `chat_template` writes there would be plain text."""
    from transformers import AutoTokenizer

    tokenizer = tiny.tokenizer() if name == "tiny" else from_hub(AutoTokenizer, name)
    say = print if dist.is_main() and not quiet else lambda *_: None
    if chat_template:
        tokenizer.chat_template = files.read_text("--chat-template", chat_template)
    else:  # restore a template that read_at_end_token cut
        tokenizer.chat_template = _each(lambda x: CUT_TEMPLATE.sub(r"\1", x), tokenizer.chat_template)
    if not tokenizer.chat_template:
        raise InputError(f"{name} has no chat template. Add chat_template.jinja; policies: --chat-template")
    end = _end_of_turn(tokenizer, name, chat_template)
    if end != tokenizer.eos_token_id:
        # Not `tokenizer.eos_token = ...`, which would leave it in texts decoded without special tokens
        tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(end)})
        say(f"{name}: the end-of-sequence token is now {tokenizer.eos_token!r}, as in the chat template")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # If padding were the end-of-sequence token, masks made from ids would drop real ends of sequences
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        spare = [token for token in added if PADDING_NAMES.search(token) and token != tokenizer.eos_token]
        if tokenizer.unk_token not in (None, tokenizer.bos_token, tokenizer.eos_token):
            spare.append(tokenizer.unk_token)  # Llama 2: a new one would make 32,001 rows, which are slow
        tokenizer.add_special_tokens({"pad_token": spare[0] if spare else "<|pad|>"})
        say(f"{name}: the padding was unset or the end-of-sequence token; now it is {tokenizer.pad_token!r}")
    return tokenizer


def _each(change, templates):
    """Apply `change` to a tokenizer's chat templates: nothing, one template, or a dict of several by name."""
    if isinstance(templates, dict):
        return {name: change(template) for name, template in templates.items()}
    return templates and change(templates)


def _after_answer(tokenizer, template=None) -> str:
    """Return the text that a chat template writes after the answer at the end of a dialogue.

    template: the template to use; None: the tokenizer's default."""
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "the answer"}]
    text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
    _, shown, after = text.rpartition("the answer")
    if not shown:
        raise ValueError("it leaves out the text of an answer")
    return after


def _end_of_turn(tokenizer, name, given=None) -> int:
    """Return the id of the token that ends an assistant turn.

    It is the first special token after the answer in the chat template. If there is no special token, it
    is the first added token that is not white space, because some tokenizers do not mark their
    end-of-sequence token as special; else it is the tokenizer's end-of-sequence token. Raises InputError
    if there is no such token, or if the template does not work, or if it is `given` by the user for a
    family whose end token is plain text to this tokenizer."""
    try:
        after = _after_answer(tokenizer)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise InputError(f"{name}: the chat template fails: {error} (--chat-template FILE)") from None
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = [i for i in ids if i in tokenizer.all_special_ids or i in added and added[i].special]
    common = [i for i in ids if i in added and added[i].content.strip()]
    end = next(iter(special + common), tokenizer.eos_token_id)
    if end is None or given and "<|" in after and not special + common:
        wrong = f"no end-of-sequence token: after answers the chat template writes {after!r}, plain text here"
        raise InputError(f"{name}: {wrong}. Give another one with --chat-template FILE")
    return end


def _valid(sampling, name):
    """Return a generation config that transformers will save, hours from now: as it is, or with sampling on,
    or if that is not enough with its tokens only."""
    sampling.temperature = sampling.temperature or None  # with 0, generate would raise
    for do_sample in (sampling.do_sample, True):  # most often there is a temperature without do_sample
        sampling.do_sample = do_sample
        try:
            sampling.validate(strict=True)
            return sampling
        except ValueError as error:
            why = " ".join(str(error).split("\n")[:2])
    if dist.is_main():
        print(f"{name}: of its generation_config.json only the tokens are kept: {why}")
    tokens = {key: x for key, x in sampling.to_diff_dict().items() if key.endswith("_token_id")}
    return type(sampling)(**tokens)


def load_policy(name, tokenizer, gradient_checkpointing=False, seed=0, lora_rank=0):
    """Load a causal language model in fp32, without dropout, and ready to train.

    It has the method `token_logprobs`. Rank 0 reads the weights; other ranks get a model on the "meta"
    device: pass it to dist.shard next. For a multimodal model, its text part is loaded.

    seed: seed of the random weights of `tiny`, and of the adapters.
    lora_rank: rank of the LoRA adapters, which are trained instead of the weights; 0: no adapters."""
    from transformers import AutoModelForCausalLM

    check_causal_lm(name)
    model = _read(AutoModelForCausalLM, name, _read_config(name), seed)
    sampling = model.generation_config
    end = tokenizer.eos_token_id
    ends = sampling.eos_token_id  # an id that is a default of transformers may be any word
    ends = ends if isinstance(ends, list) else {ends} & tokenizer.added_tokens_decoder.keys()
    # Llama 3 and Qwen end with either of two tokens, Qwen's base models with one that their template lacks
    more = [token for token in ends if token != end]
    sampling.pad_token_id = tokenizer.pad_token_id
    sampling.eos_token_id = [end, *more] if more else end
    model.generation_config = _valid(sampling, name)
    n_rows = len(model.get_input_embeddings().weight)
    model = _ready(model, tokenizer, [models.token_logprobs], gradient_checkpointing)
    if lora_rank and dist.is_main():
        _check_rows(model, tokenizer, n_rows, name)
    return lora.attach(model, lora_rank, seed) if lora_rank else model


def load_frozen(name, tokenizer, args, device):
    """Load a policy that is not trained, sharded over the ranks."""
    return dist.shard(load_policy(name, tokenizer, seed=args.seed).requires_grad_(False), device)


def load_unsharded(name, device):
    """Load a causal language model that is not trained, in the compute dtype and whole on every rank."""
    from transformers import AutoModelForCausalLM

    check_causal_lm(name)
    dtype = dist.compute_dtype_of(device)
    model = _read(AutoModelForCausalLM, name, _read_config(name), seed=0, dtype=dtype, on_all_ranks=True)
    model.to(device).eval().requires_grad_(False)  # rotary frequencies stay in fp32
    check_forward(model)
    set_attention(model)
    return model


def ask_policy(name, tokenizer, args, device, forward):
    """Load the policy of this name, return forward(policy), and free the policy."""
    # Methods bound to a model make a reference cycle that keeps its weights: free those of earlier models
    gc.collect()
    values = forward(load_frozen(name, tokenizer, args, device))
    gc.collect()
    return values


def load_scorer(name, tokenizer, n_outputs=None, gradient_checkpointing=False, seed=0):
    """Load a model with a linear head of n_outputs on its last hidden states instead of the unembedding.

    It is a *ForSequenceClassification (see _add_classifier) with the method `head_outputs`. As in
    load_policy, only rank 0 has the weights.

    name: a causal language model, whose body gets a new head drawn with `seed` (normal, with a standard
      deviation of (hidden size + 1)^-0.5, so that first scores have about unit size); or a model that has
      such a head, which is kept.
    n_outputs: 1 for a reward model, 2 for an advantage model; None: either one, but trained here before.

    Raises InputError for any other model."""
    from transformers import AutoModelForSequenceClassification

    config = _read_config(name)
    new_head = "ForSequenceClassification" not in _kind(config)
    outputs = config.num_labels
    trained_here = not new_head and (outputs == 1 or outputs == 2 and hasattr(config, "advantage_model"))
    fits = n_outputs is not None if new_head else trained_here and n_outputs in (None, outputs)
    if not fits:
        kinds = {1: "a reward model (1 output)", 2: "an advantage model (2 outputs)"}
        other = f"a {_kind(config)}" if new_head else f"a classifier of {outputs} labels"
        wanted = f"{kinds[n_outputs]} or a causal language model" if n_outputs else TRAINED_HERE
        raise InputError(f"{name} is {kinds[outputs] if trained_here else other}, not {wanted}")
    if new_head:
        # Setting id2label sets num_labels too
        config.id2label = dict(enumerate(("reward", "expected_reward")[:n_outputs]))
        config.label2id = {label: i for i, label in config.id2label.items()}
    config.problem_type = "regression"  # so that no pipeline applies a sigmoid
    _add_classifier(type(config))
    model = _read(AutoModelForSequenceClassification, name, config, seed)
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise InputError(f"{name}: {type(model).__name__} has no linear head named score")
    if new_head and dist.is_main():
        deviation = (model.score.in_features + 1) ** -0.5
        torch.nn.init.normal_(model.score.weight, 0, deviation, torch.Generator().manual_seed(seed))
    return _ready(model, tokenizer, (models.head_outputs,), gradient_checkpointing)


def _add_classifier(config_class):
    """Add a *ForSequenceClassification for a family of models if transformers has none for it.

    It is made like those of other families: the family's body, and a linear head named score."""
    from transformers import AutoModel, AutoModelForSequenceClassification
    from transformers.modeling_layers import GenericForSequenceClassification

    body = AutoModel._model_mapping.get(config_class, None)
    if body and config_class not in AutoModelForSequenceClassification._model_mapping:
        name = body.__name__.removesuffix("Model") + "ForSequenceClassification"
        attributes = {"config_class": config_class, "base_model_prefix": body.base_model_prefix}
        attributes["__module__"] = body.__module__  # else transformers leaves its buffers unset
        made = type(name, (GenericForSequenceClassification, body.__mro__[1]), attributes)
        AutoModelForSequenceClassification.register(config_class, made, exist_ok=True)


def is_causal_lm(name) -> bool:
    """Return whether this is a causal language model; a model with a scalar head, for example, is not."""
    kind = _kind(_read_config(name))
    return any(word in kind for word in ("causal", "ForCausalLM", "LMHeadModel"))


def check_causal_lm(name, tokenizer=None, chat_template=None):
    """Raise InputError unless `name` is a causal language model that matches the tokenizer.

    tokenizer: its vocabulary must be that of the model's own tokenizer; None: any.
    chat_template: the template that `tokenizer` was loaded with."""
    if not is_causal_lm(name):
        raise InputError(f"{name} is a {_kind(_read_config(name))}, not a causal language model")
    if tokenizer and load_tokenizer(name, chat_template, quiet=True).get_vocab() != tokenizer.get_vocab():
        raise InputError(f"{name} has a different vocabulary from --model, so its ids mean other tokens")


def check_room(length: int, name):
    """Raise InputError if a model has fewer positions than `length`, the value of --max-length."""
    if length > (room := n_positions(name)):
        raise InputError(f"--max-length {length}: {name} has only {room} positions")


def n_positions(name) -> int:
    """Return how many tokens a row of the model of this name may have."""
    return models.n_positions(_read_config(name))


def identity(name, seed=0) -> list:
    """Return a list that changes when the model of this name does.

    For a folder it is its files' names and SHA-256, wherever the folder is; hidden files and .md files do not
    count. For a model of the hub it is the commit, which is known once its config is on this machine; so it
    is for that commit's folder in the hub's cache (models--ORG--NAME/snapshots/COMMIT). For `tiny` it is the
    name and `seed`, the seed of its random weights. Raises InputError for a hub model that is not on this
    machine."""
    folder = Path(find_model(name))
    if name == "tiny":
        return [name, seed]
    if not folder.is_dir():
        config = try_to_load_from_cache(name, "config.json")
        if not isinstance(config, str):
            raise InputError(f"{name} is neither a folder nor in this machine's cache of the hub")
        folder = Path(config).parent
    if re.search(r"(^|/)models--[^/]+/snapshots/[^/]+$", folder.as_posix()):
        return [folder.name]
    paths = [path for path in sorted(folder.glob("[!.]*")) if path.is_file() and path.suffix != ".md"]
    with ThreadPoolExecutor() as pool:
        return list(map(list, zip([path.name for path in paths], pool.map(sha256, paths))))


def sha256(path) -> str:
    """Return the SHA-256 of a file, which is read again only if its size or modification time has changed."""
    path = Path(path).resolve()
    return _sha256(path, path.stat().st_size, path.stat().st_mtime_ns)


@functools.lru_cache
def _sha256(path, *_):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(config):
    """Return the name of a model's class, or "causal language model" if its config does not have it."""
    return (config.architectures or ["causal language model"])[0]


def _read_config(name):
    """Load the config of a model, with dropout and layerdrop set to 0.

    For a multimodal model it is the config of its text part, if that is a causal language model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = tiny.model().config if name == "tiny" else from_hub(AutoConfig, name)
    text = getattr(config, "text_config", None)
    quantization = getattr(config, "quantization_config", None)
    method = quantization and dict(quantization).get("quant_method")
    if type(text) in AutoModelForCausalLM._model_mapping and "ForSequenceClassification" not in _kind(config):
        if quantization:
            why = f"its weights are quantised ({method}), which is supported for models of text only"
            raise InputError(f"{name}: {why}. Give a checkpoint in bfloat16 or float32")
        text.text_part_of = _kind(config)
        text.dtype = config.dtype
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
        text.architectures = [AutoModelForCausalLM._model_mapping[type(text)].__name__]
        config = text
    elif method in ("fp8", "mxfp4"):
        config.quantization_config = {**quantization, "dequantize": True}  # a CPU does so anyway
    for part in (config, *(getattr(config, key) for key in config.sub_configs)):
        for key, value in part.to_dict().items() if part else ():
            # With dropout, old and new probabilities would never agree
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def from_hub(auto_class, name, **options):
    """Call auto_class.from_pretrained.

    Raises InputError if the model does not exist, or if transformers cannot load it."""
    try:
        return auto_class.from_pretrained(find_model(name), trust_remote_code=False, **options)
    except Exception as error:  # truncated files raise errors of many kinds
        own_code = "needs code of its own (trust_remote_code), which is not run here"
        why = own_code if "trust_remote_code" in str(error) else error
        raise InputError(f"{name}: {'no such folder; ' * (not Path(name).exists())}{why}") from None


def _read(auto_class, name, config, seed, dtype=torch.float32, on_all_ranks=False):
    """Load a model with weights on rank 0 only, or on all ranks; the weights of `tiny` are drawn with `seed`.

    Raises InputError if transformers does not know this kind of model, or if weights are not in the files."""
    kind = auto_class._model_mapping.get(type(config), None)
    if kind is None:
        raise InputError(f"{name}: transformers has no {auto_class.__name__[9:]} for {config.model_type}")
    # Masks are made for SDPA, but SDPA cannot cap attention scores. Models that cap them use eager attention,
    # for which the masks become 0 and -inf
    sdpa = kind._supports_sdpa and not getattr(config, "attn_logit_softcapping", None)
    options = {"dtype": dtype, "attn_implementation": "sdpa" if sdpa else "eager"}
    is_tied = getattr(config, "tie_word_embeddings", False)
    reads = on_all_ranks or dist.is_main()
    info = {"missing_keys": []}
    if reads and name != "tiny":
        mapping = TEXT_PART if hasattr(config, "text_part_of") else None
        load = functools.partial(from_hub, auto_class, name, output_loading_info=True, key_mapping=mapping)
        model, info = load(config=config, **options)
        head = model.get_output_embeddings()
        embeddings = model.get_input_embeddings()
        if is_tied and head is not None and not torch.equal(head.weight, embeddings.weight):
            config.tie_word_embeddings = is_tied = False  # the files hold a head of its own
            model = head = embeddings = None  # only one is in memory
            model, info = load(config=config, **options)
    dist.barrier()  # reading may take longer than gather waits
    config.tie_word_embeddings = dist.gather([is_tied])[0]
    new_head = set() if "ForSequenceClassification" in _kind(config) else {"score.weight"}
    missing = sorted(set(info["missing_keys"]) - new_head)
    if missing:
        raise InputError(f"{name}: {len(missing)} of its weights are missing, such as {missing[0]}")
    if not reads or name == "tiny":
        with torch.device("cpu" if reads else "meta"):
            model = auto_class.from_config(config, **options)
        if reads:
            model.base_model.load_state_dict(tiny.model(seed).base_model.state_dict())
    if model.base_model is model:
        model.base_model_prefix = "model"  # Llama 4's text part names a prefix that it does not have
    return model


def _ready(model, tokenizer, methods, gradient_checkpointing):
    """Make a loaded model ready for training: its embeddings, special ids, methods and training mode."""
    if getattr(model, "is_quantized", False):
        raise InputError(f"{model.name_or_path}: quantised. Give a checkpoint in bfloat16 or float32")
    _fit_embeddings(model, 1 + max(tokenizer.get_vocab().values()))  # not len(tokenizer): ids may have gaps
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    for module in model.modules():
        # A padding row gets no gradient, but in some configs it is that of the end-of-sequence token
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    if gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            kind = model.config.model_type
            raise InputError(f"--gradient-checkpointing: models of the type {kind} have none")
        # Renamed in transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    models.with_methods(model, methods)
    if dist.is_main():
        check_forward(model.train())
    set_attention(model)
    return model.train()


def set_attention(model):
    """Switch the model to the implementation of attention that --attention names.

    Call it after check_forward, which runs on the CPU, where flash attention has no kernels. Flex attention
    has no backward on a CPU in torch 2.13, and compiles anew for each shape, so it is refused there. So is
    varlen (models.py), and in families whose masks say more than flash attention is told. Raises InputError
    if transformers does not know the name, or the family or this machine does not support it."""
    name = dist.attention
    on_cpu = dist.here.type == "cpu" and ("flex" in name or name == "varlen")
    needs_masks = name == "varlen" and not model._supports_flash_attn
    try:
        if name != "default":
            model.set_attn_implementation(name)
            if model.config._attn_implementation in {"eager", "sdpa"} - {name} or on_cpu or needs_masks:
                raise ValueError(f"{model.config.model_type} does not learn with it on {dist.here.type}")
    except Exception as error:  # unknown names, missing packages, the hub's kernels: many types
        raise InputError(f"--attention {name}: {error}") from None


@torch.no_grad()
def check_forward(model):
    """Raise InputError if two forwards of a model differ: old and new probabilities would then never agree.

    For a policy, the second forward is that of transformers itself, which shows whether the model changes
    its logits in a way that `token_logprobs` does not know."""
    config = model.config.get_text_config()
    window = checks.window(model.config)
    # Longer than the attention window, unless that is slow on a CPU; changes to logits show in short rows too
    n = min(models.n_positions(config), 64 + (window if window < 1024 else 0))
    ids = torch.arange(n, device=model.device)[None] % config.vocab_size
    if hasattr(model, "head_outputs"):
        outputs, expected = (model.head_outputs(ids, (ids >= 0).nonzero().T) for _ in range(2))
    else:
        outputs = models.token_logprobs(model, ids, ids[:, 1:] >= 0)[..., None]
        expected = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        expected = expected.gather(-1, ids[:, 1:, None])
    close = 1e-3 if model.dtype == torch.float32 else 0.1
    if not torch.allclose(outputs, expected, rtol=close, atol=close):
        why = "it draws experts at random, has NaN weights, or changes logits by more than a factor and a cap"
        raise InputError(f"{config.model_type}: two forwards differ: {why}")


def _fit_embeddings(model, n_tokens):
    """Add rows to the embeddings if there are fewer rows than tokens.

    A new row is the mean of the others, so that a new token is as likely as an average one, and the
    probabilities of the other tokens hardly change."""
    old = model.get_input_embeddings().weight.shape[0]
    if n_tokens <= old:
        return
    model.resize_token_embeddings(n_tokens, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            for weight in module.parameters() if module else ():  # a scorer has no unembedding
                weight[old:] = weight[:old].mean(0)


@torch.no_grad()
def _check_rows(model, tokenizer, n_rows, name):
    """Raise InputError if LoRA adapters could not teach the model to end an answer.

    Adapters leave the unembedding as it is. If the row of the end-of-sequence token is the mean of all
    rows, or the same as another token's row, that token can never become more likely than those. New
    tokens, beyond the n_rows that the model came with, cannot be learnt either and are printed. (Padding
    is never predicted.)"""
    end = tokenizer.eos_token_id
    rows = model.get_output_embeddings().weight
    mean = rows.mean(0, keepdim=True)
    distance = lambda row: torch.cdist(rows, row, compute_mode="donot_use_mm_for_euclid_dist")[:, 0]
    to_end = distance(rows[end : end + 1])
    to_end[end] = (rows[end] - mean).norm()
    if to_end.min() < 0.01 * distance(mean).median():
        reason = f"{name} has never learnt its end token {tokenizer.eos_token!r}, which adapters cannot learn"
        mend = "Train once without --lora-rank, or give a --chat-template with an end token it knows"
        raise InputError(f"--lora-rank: {reason}. {mend}")
    new = sorted(i for i in tokenizer.get_vocab().values() if i >= n_rows and i != tokenizer.pad_token_id)
    if new:
        tokens = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(new[:3])))
        print(f"{name}: with --lora-rank {len(new)} new token(s) cannot be learnt ({tokens})")


# -- export and checks -----------------------------------------------------------------------------
def read_at_end_token(model, tokenizer):
    """Prepare a scorer that was trained here for saving.

    Its config says that the score is read at the end-of-sequence token. transformers' own classifier, and
    with it a pipeline, reads the last token of a text instead, so the text that the chat templates write
    after an answer's end-of-sequence token is cut. load_tokenizer restores the templates."""
    model.config.read_at = "end_token"

    def cut(template):
        try:
            tail = _after_answer(tokenizer, template).partition(tokenizer.eos_token)[2]
        except (jinja2.TemplateError, TypeError, ValueError):  # one may be only for tools or documents
            return template
        bare = template.removesuffix("\n")  # jinja drops a newline at the very end
        line = "\n" * template.startswith("\n")  # and one after a tag, as transformers sets it up
        shorter = f"{{{{ dialogue if add_generation_prompt else dialogue.removesuffix({tail!r}) }}}}"
        whole = f"{{% set dialogue %}}{line}{bare}{{% endset %}}{shorter}{template[len(bare) :]}"
        return whole if tail else template

    tokenizer.chat_template = _each(cut, tokenizer.chat_template)


def end_of_scored(model, tokenizer) -> list[int]:
    """Return the tokens that follow a response's text; the score is read at the last of them.

    For a model that was trained here it is the end-of-sequence token. For any other model it is everything
    that the chat template writes after the text."""
    if getattr(model.config, "read_at", None) == "end_token":
        return [tokenizer.eos_token_id]
    return tokenizer(_after_answer(tokenizer), add_special_tokens=False)["input_ids"]


def check_sampled(name, mend=""):
    """Raise InputError if the sampler cannot run the model of this name: better now than hours from now.

    That is the case if the sampler does not know its attention, or if ranks cannot share a copy of it.

    mend: how to do without samples, for the message."""
    config = _read_config(name).get_text_config()
    tensor_parallel.check(config, dist.ranks_per_copy)
    try:
        sampler.check_attention(config)
    except ValueError as error:
        raise InputError(f"{name}: {error}: this model cannot be sampled{mend and f'; {mend}'}") from None


def check_policy(name, tokenizer, args, sampled=True):
    """Raise InputError unless a policy fits the command.

    It must have the tokenizer's vocabulary (None: any), room for --max-length and, with `sampled`, an
    architecture that the sampler can run."""
    check_causal_lm(name, tokenizer, args.chat_template)
    check_room(args.max_length, name)
    if sampled:
        check_sampled(name)
