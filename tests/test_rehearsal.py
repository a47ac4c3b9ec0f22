"""common/programs/rehearsal.py: its selection, the embeddings, and the rows as ppo.py and sft.py read
them."""

import math
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import flags
from helpers import CPU, TOKENIZER, succeeds, write_rows
from transformers import AutoModelForCausalLM

from common import dist, responses
from common.batches import Row, collate
from common.errors import InputError
from common.data import chat, demonstrations, mixtures, prompt_sets, splits, tiny
from common.data.files import read_jsonl
from common.loading import pretrained
from common.scoring import functions, scorers
from common.run import checkpoints
from common.programs import rehearsal

GOLD = "common.data.tiny:gold_scorer"


# -- select ------------------------------------------------------------------------------
# Three groups that lie far apart, mixed: rows 0 3 6 around x, 1 4 7 9 around y, 2 5 8 around z
GROUPS = [{0, 3, 6}, {1, 4, 7, 9}, {2, 5, 8}]
AXIS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 1]
EMBEDDINGS = F.normalize(torch.eye(3)[AXIS] + 0.01 * torch.arange(30).view(10, 3) / 30, dim=1)
SCORES = [1.0, 5.0, 2.0, 3.0, -1.0, 2.5, 2.0, 9.0, -4.0, 6.0]


def selected(per_cluster, usable=(True,) * 10, n_clusters=3, scores=SCORES):
    """The indices of each cluster in their order, keyed by the group that they belong to."""
    found = rehearsal.select(EMBEDDINGS, scores, usable, n_clusters, per_cluster)
    assert [cluster for cluster, _ in found] == sorted(cluster for cluster, _ in found)
    out = {}
    for cluster, i in found:
        out.setdefault(cluster, []).append(i)
    return sorted(out.values(), key=lambda some: AXIS[some[0]])


def test_the_best_of_each_cluster_come_first_best_score_first():
    assert selected(2) == [[3, 6], [7, 9], [5, 2]]
    assert selected(1) == [[3], [7], [5]]  # the best three of all would be 7, 9, 1 of one group
    assert selected(99) == [[3, 6, 0], [7, 9, 1, 4], [5, 2, 8]]
    assert [set(group) for group in selected(99, scores=SCORES[::-1])] == GROUPS  # whatever the scores


def test_unusable_responses_are_replaced_by_the_next_best():
    usable = [i not in (3, 7, 9, 2, 5, 8) for i in range(10)]
    assert selected(2, usable) == [[6, 0], [1, 4]]  # of the third group none is left
    assert selected(2, [False] * 10) == []


# -- k-means -----------------------------------------------------------------------------
def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def partition(labels):
    """The rows of each cluster."""
    return {frozenset(i for i, x in enumerate(labels) if x == label) for label in labels}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "rows, n_clusters, clusters",
    [
        ((0, 20, 1, 10, 21, 11), 3, [{0, 2}, {3, 5}, {1, 4}]),
        ((0, 1, 2, 9), 2, [{0, 1, 2}, {3}]),  # squares 2; {0, 1} and {2, 9} have 25
        ((0, 3, 6, 9), 2, [{0, 1}, {2, 3}]),  # squares 9; {0, 1, 2} and {3} have 18
        ((3, 3, 3), 2, [{0, 1, 2}]),  # equal rows stay together, so one cluster is all there is
        ((3, 3, 7), 3, [{0, 1}, {2}]),
        ((3, 7), 5, [{0}, {1}]),
        ((5,), 1, [{0}]),
    ],
)
def test_kmeans_by_hand(rows, n_clusters, clusters, seed):
    found = rehearsal.kmeans(column(*rows), n_clusters, seed)
    assert partition(found) == set(map(frozenset, clusters)) and max(found) < n_clusters
    assert found == rehearsal.kmeans(column(*rows), n_clusters, seed)


def test_kmeans_keeps_the_best_of_several_starts():
    """Two groups far apart, each of two near points: two centres in one group is a local optimum."""
    x, ends = torch.tensor([[a, b] for a in (0.0, 9.0) for b in (0.0, 4.0)] * 5), []
    for start in ([0, 2], [0, 1]):
        labels, total = rehearsal.lloyd(x, x[start])
        ends.append((partition(labels.tolist()) == partition([0, 0, 1, 1] * 5), total))
    assert ends == [(True, 20 * 2.0**2), (False, 20 * 4.5**2)]
    for seed in range(5):
        assert partition(rehearsal.kmeans(x, 2, seed)) == partition([0, 0, 1, 1] * 5)


def test_a_centre_without_rows_stays_where_it_is():
    labels, total = rehearsal.lloyd(column(0, 1, 10), column(0, 10, 99))
    assert labels.tolist() == [0, 0, 1] and total == 0.5


# -- embed -------------------------------------------------------------------------------
def prompt(text, number=1):
    turns = [{"role": "user", "content": text}]
    return responses.Prompt(chat.prompt_ids(TOKENIZER, turns), turns, Row(f"prompts:{number}", {}))


TEXTS = [
    "copy ant", "first bear cat dog eel fox", "rest dog eel ant", "last ant ant ant ant ant ant bear",
    "next cat",
]  # fmt: skip
IDS = [prompt(text).ids for text in TEXTS]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_an_embedding_is_the_mean_last_hidden_state_of_a_prompts_own_tokens(batch_size):
    model = dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU)
    with dist.consolidated(model):
        got = rehearsal.embed(model, IDS, batch_size)
    plain = AutoModelForCausalLM.from_config(tiny.model().config)
    plain.load_state_dict(tiny.model().state_dict())
    assert got.shape == (5, 128) and not got.requires_grad
    with torch.no_grad():
        for ids, vector in zip(IDS, got):
            hidden = plain(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
            mean = hidden.mean(0)
            torch.testing.assert_close(vector, mean / mean.norm(), atol=1e-5, rtol=1e-5)
    assert torch.allclose(got.norm(dim=1), torch.ones(5)) and len({round(x[0].item(), 5) for x in got}) == 5


# -- rows --------------------------------------------------------------------------------
def rows_from(monkeypatch, answers, criterion="score", seed=0):
    """rehearsal_rows of the prompts of TEXTS, the policy's answers being these, in one cluster."""
    monkeypatch.setattr(responses, "sample_responses", lambda _, __, asked, **___: list(zip(asked, answers)))
    model = dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU)
    count = lambda prompts, texts, rows: [len(t.split()) for t in texts]
    judge = scorers.Scorer("f", "1", functions.Term(count)) if criterion == "score" else None
    prompts = [prompt(text, i) for i, text in enumerate(TEXTS)]
    args = rehearsal.Args(clusters=1, per_cluster=9, max_new_tokens=8, criterion=criterion, seed=seed)
    return rehearsal.rehearsal_rows(model, TOKENIZER, judge, prompts, args)


def answer(text, finished=True):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return responses.Response(ids + [TOKENIZER.eos_token_id] * finished, text, finished)


def test_rows_hold_the_prompt_the_response_its_cluster_and_its_score_best_first(monkeypatch):
    with_special_token = answer("ant bear")._replace(clean=False)
    cut = answer("ant bear cat", finished=False)
    some = [with_special_token, cut, answer(" "), answer("bear cat"), answer("ant bear cat dog")]
    rows = rows_from(monkeypatch, some)
    assert [(row["completion"], row["score"], row["cluster"]) for row in rows] == [
        ("ant bear cat dog", 4, 0), ("bear cat", 2, 0),
    ]  # fmt: skip  # none that was cut, has no words, or a special token inside
    assert rows[0]["prompt"] == [{"role": "user", "content": TEXTS[4]}]
    with pytest.raises(InputError, match="no response ended within 8 tokens"):
        rows_from(monkeypatch, [cut] * 5)


FOUR = ["ant bear", "bear", "ant bear cat dog eel", "eel bear cat"]


def test_by_length_the_shortest_come_first_without_a_scorer(monkeypatch):
    rows = rows_from(monkeypatch, [*map(answer, FOUR), answer("ant", finished=False)], "length")
    assert [(row["completion"], row["length"]) for row in rows] == [
        ("bear", 2), ("ant bear", 3), ("eel bear cat", 4), ("ant bear cat dog eel", 6),
    ]  # fmt: skip
    assert all(row.keys() == {"prompt", "completion", "cluster", "length"} for row in rows)


def test_at_random_the_seed_decides_without_a_scorer(monkeypatch):
    usable = [answer(text) for text in ("ant", "bear", "cat", "dog eel")]
    first = set()
    for seed in range(20):
        rows = rows_from(monkeypatch, [*usable, answer("fox", finished=False)], "random", seed)
        assert rows == rows_from(monkeypatch, [*usable, answer("fox", finished=False)], "random", seed)
        assert sorted(row["completion"] for row in rows) == ["ant", "bear", "cat", "dog eel"]
        first.add(rows[0]["completion"])
    assert len(first) == 4  # by score, length or the prompts' order it is always the same one


def test_by_entropy_the_lowest_comes_first_whatever_the_length(monkeypatch):
    """The distribution after a token is uniform: over 4 tokens after ant, 16 after bear, 1 after cat, dog and eel,
    and 2 after the prompt's last token."""
    sizes = {"ant": 4, "bear": 16, "cat": 1, "dog": 1, "eel": 1}
    size_after = {TOKENIZER(word, add_special_tokens=False)["input_ids"][0]: n for word, n in sizes.items()}

    def logprobs(model, batch, entropy):
        before = [[size_after.get(i, 2) for i in row] for row in batch.input_ids[:, :-1].tolist()]
        return 0.0 * batch.action_mask, torch.where(batch.action_mask, torch.tensor(before).log(), 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(rehearsal.models, "logprobs", logprobs)
        rows = rows_from(monkeypatch, [*map(answer, FOUR), answer("cat", finished=False)], "entropy")
    by_hand = {  # log2 of the sizes: of the prompt 1, ant 2, bear 4
        "ant bear": (1 + 2 + 4) / 3, "bear": (1 + 4) / 2, "ant bear cat dog eel": (1 + 2 + 4) / 6,
        "eel bear cat": (1 + 0 + 4 + 0) / 4,
    }  # fmt: skip
    # sums over tokens (7, 5, 7, 5) would begin with "bear" and "eel bear cat", the highest mean with "bear"
    assert [row["completion"] for row in rows] == sorted(by_hand, key=by_hand.get)
    for row in rows:
        assert row["entropy"] == pytest.approx(by_hand[row["completion"]] * math.log(2))


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_entropy_is_that_of_the_distributions_of_a_responses_tokens(size):
    model = dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU)
    pairs = [(prompt(text), answer(word)) for text, word in zip(TEXTS, FOUR)]
    got = rehearsal.values_of("entropy", model, None, pairs, size)
    plain = AutoModelForCausalLM.from_config(tiny.model().config)
    plain.load_state_dict(tiny.model().state_dict())
    for (p, r), mean in zip(pairs, got, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([p.ids + r.ids])).logits[0, len(p.ids) - 1 : -1]
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        assert len(entropies) == len(r.ids) and mean == pytest.approx(entropies.mean().item(), rel=1e-4)


# -- the program -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A policy on disk that ends its answers now and then, and prompts."""
    folder = tmp_path_factory.mktemp("rehearsal")
    model = dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU)
    documents = demonstrations.sft_documents(
        [Row(f"sft:{i}", row) for i, row in enumerate(tiny.rows("sft", "train")[:240])], TOKENIZER, 64, "sft"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for i in range(15):  # a little supervised training
        batch = collate([[d] for d in documents[16 * i : 16 * i + 16]], TOKENIZER.pad_token_id)
        loss = -model.token_logprobs(batch.input_ids, batch.action_mask, batch.position_ids).sum() / 80
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoints.save_model(model, TOKENIZER, folder / "policy")
    write_rows(folder / "prompts.jsonl", tiny.rows("prompts", "train")[:24])
    write_rows(folder / "asked.jsonl", tiny.rows("prompts", "test")[:4])
    return folder


OPTIONS = {"scorer": GOLD, "clusters": 3, "per_cluster": 4, "max_new_tokens": 10, "max_length": 64}


@pytest.fixture(scope="module")
def written(files):
    """The rows that `python -m common.programs.rehearsal` writes."""
    paths = {
        "model": files / "policy",
        "dataset": files / "prompts.jsonl",
        "output": files / "rehearsal.jsonl",
    }
    ended = succeeds(processes.python("-m", "common.programs.rehearsal", *flags(**OPTIONS, **paths)))
    assert f"wrote {len(read_jsonl(files / 'rehearsal.jsonl'))} rows" in ended.out
    assert not list(files.glob("*.tmp"))
    return files / "rehearsal.jsonl"


def test_rehearsal_rows_are_responses_of_ppos_first_policy(files, written):
    """Step by step, with ppo.py's seeds: one response to each prompt, k-means of the mean last hidden states,
    and of each cluster the best responses that ended. The prompts are those that ppo.py does not hold out."""
    policy = dist.shard(pretrained.load_policy(str(files / "policy"), TOKENIZER), CPU)
    prompts, _ = splits.hold_out(prompt_sets.load_prompts(str(files / "prompts.jsonl"), "train", TOKENIZER, 54))
    ids, seed = [p.ids for p in prompts], dist.seed_of(0, "sr")
    answers = responses.sample_responses(policy, TOKENIZER, prompts, max_new_tokens=10, slots=256, seed=seed)
    with torch.no_grad():
        hidden = [policy.base_model(input_ids=torch.tensor([x])).last_hidden_state[0].mean(0) for x in ids]
    clusters = rehearsal.kmeans(F.normalize(torch.stack(hidden), dim=1).double(), 3)
    rows = [[], [], []]
    for p, (_, r), cluster in zip(prompts, answers, clusters):
        score = tiny.gold_score(p.turns[-1]["content"], r.text)
        row = {"prompt": p.turns, "completion": r.text, "cluster": cluster, "score": score}
        rows[cluster] += [row] if r.finished and r.clean and r.text.strip() else []
    best = [sorted(cluster, key=lambda row: -row["score"])[:4] for cluster in rows]
    assert read_jsonl(written) == sum(best, []) and max(map(len, rows)) > 4


@pytest.mark.parametrize(
    "options, words",
    [
        ({"clusters": 0}, "--clusters 0: expected 1 or more"),
        ({"output": "/nowhere/rows.jsonl"}, "--output /nowhere/rows.jsonl: no such folder"),
        ({"output": __file__}, "--output .*test_rehearsal.py: already exists"),
    ],
)
def test_a_mistake_is_named_before_anything_is_sampled(options, words, files, tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "sample_responses", None)
    given = {
        "model": str(files / "policy"),
        "dataset": str(files / "prompts.jsonl"),
        "output": str(tmp_path / "x"),
    }
    with pytest.raises(InputError, match=words):
        rehearsal.main(rehearsal.Args(**{**OPTIONS, **given, **options}))
    assert not any(tmp_path.iterdir())


def test_rehearsal_uses_no_prompt_that_ppo_holds_out(files, tmp_path, monkeypatch):
    """20 of 400 prompts are held out; the same hash would choose just these 20. All training prompts of ppo.py
    have the same chance: about half of the chosen ones are in the first half of its order."""
    path, taken = str(write_rows(tmp_path / "prompts.jsonl", tiny.rows("prompts", "train")[:400])), []
    monkeypatch.setattr(rehearsal, "rehearsal_rows", lambda *x: taken.extend(x[3]) or [])
    given = {"model": str(files / "policy"), "dataset": path, "output": str(tmp_path / "x")}
    rehearsal.main(rehearsal.Args(**{**OPTIONS, **given, "max_prompts": 100}))
    limits = {"dataset": path, "eval_dataset": None, "max_length": 64, "max_new_tokens": 10}
    train, held_out = prompt_sets.train_and_held_out(SimpleNamespace(scorer="runs/reward", **limits), TOKENIZER)
    keys = {prompt.key for prompt in taken}
    assert len(keys) == 100 and len(held_out) == 20 and not keys & {prompt.key for prompt in held_out}
    by_hash = {prompt.key for prompt in mixtures.random_subset(train, 190)}
    assert 35 <= len(keys & by_hash) <= 65


@pytest.mark.parametrize("criterion", ["entropy", "length"])
def test_without_a_scorer_rehearsal_rows_are_the_lowest_of_each_cluster(criterion, files, tmp_path):
    paths = {"model": str(files / "policy"), "dataset": str(files / "prompts.jsonl"), "scorer": "nowhere"}
    written = {}
    for k in (1, 99):
        output = str(tmp_path / f"{k}.jsonl")
        options = {**OPTIONS, **paths, "per_cluster": k, "criterion": criterion, "output": output}
        rehearsal.main(rehearsal.Args(**options))
        written[k] = read_jsonl(output)
    lowest = {}
    for row in written[99]:
        lowest.setdefault(row["cluster"], []).append(row[criterion])
    assert len(written[99]) > 10 and all(values == sorted(values) for values in lowest.values())
    assert [row[criterion] for row in written[1]] == [min(values) for values in lowest.values()]
    assert len(demonstrations.load_sft(str(tmp_path / "1.jsonl"), TOKENIZER, 64)) == len(written[1]) == 3


def test_rehearsal_rows_are_valid_for_sft_and_keep_every_token(written, tmp_path):
    rows = read_jsonl(written)
    documents = demonstrations.sft_documents(mixtures.load_rows(str(written), "sft"), TOKENIZER, 64, str(written))
    assert len(documents) == len(rows)
    for document, row in zip(documents, rows):
        learnt = document.ids[document.response_mask].tolist()
        assert TOKENIZER.decode(learnt[:-1]) == row["completion"] and learnt[-1] == TOKENIZER.eos_token_id
    held_out = write_rows(tmp_path / "held_out.jsonl", tiny.rows("sft", "test")[:4])
    options = {
        "dataset": written, "eval_dataset": held_out, "max_length": 64, "batch_size": 2, "max_steps": 2,
    }  # fmt: skip
    options |= {"sample_prompts": 0, "output_dir": tmp_path / "sft"}
    succeeds(processes.script("sft", *flags(**options), plots=False))
    held_out = [prompt(row["prompt"][-1]["content"]) for row in rows[:2]]  # they are not rehearsed
    documents = demonstrations.load_sft(str(written), TOKENIZER, 64, held_out=held_out)
    assert len(documents) < len(rows) and not {d.key for d in documents} & {p.key for p in held_out}
