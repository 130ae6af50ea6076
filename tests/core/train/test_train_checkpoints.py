"""Checkpoints: whole or absent, loadable by transformers and peft with the same logits, and enough to go on from."""

import json
import os
from pathlib import Path

import pytest
import torch

from strop.core.errors import DataError, OutputFailed, UsageError
from strop.core.train import checkpoints
from strop.core.train.batches import Batch
from strop.core.train.checkpoints import About, find_checkpoint, keep_newest, write_checkpoint
from strop.core.train.loop import OptimOptions, Trainer
from strop.core.train.losses import LossOptions
from strop.core.train.policy import LoraOptions
from strop.core.train.run import Run, RunOptions, Start, Update, find_start
from strop.core.train.setup import Opener, SetupOptions

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def base(tiny_llama, tmp_path):
    folder = tmp_path / "base"
    tiny_llama("float32").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def batches(random_examples, count=4):
    examples = random_examples(3 * count)
    return [Batch(examples[3 * i : 3 * i + 3], [f"g{i}"]) for i in range(count)]


def make_run(base, out, start=None, lora: int | None = 4, loss=None, **options):
    setup = SetupOptions(
        model=str(base), lora=LoraOptions(lora, 8.0) if lora else None, dtype="float32", device="cpu",
        start=start.checkpoint if start else None,
    )  # fmt: skip
    opener = Opener(setup)
    return Run(
        start or Start(),
        RunOptions(out, str(base), options={"loss": "ppo"}, **options),
        opener.setup,
        lambda opened: Trainer(opened.policy, loss or LossOptions("ppo"), OptimOptions(lr=1e-2)),
    )


def finish(run, some):
    events = list(run.run(some, lambda _: None))
    return [event for event in events if isinstance(event, Update)], events[-1]


def weights_of(folder):
    from safetensors.torch import load_file

    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


def assert_equal_weights(one, other):
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_adapter_reloads_in_peft_with_the_same_logits(base, tmp_path, random_examples):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = make_run(base, tmp_path / "out")
    _, checkpoint = finish(run, batches(random_examples))
    ours = run._setup.policy.model(IDS).logits
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out" / "latest")
    torch.testing.assert_close(again(IDS).logits, ours, rtol=0, atol=1e-6)
    untouched = AutoModelForCausalLM.from_pretrained(base)(IDS).logits
    assert (untouched - ours).abs().max() > 1e-3
    config = json.loads((checkpoint.path / "adapter_config.json").read_text())
    assert (config["r"], config["modules_to_save"], config["bias"]) == (4, None, "none")
    assert config["base_model_name_or_path"] == str(base)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in weights_of(checkpoint.path)} == {"lora_A", "lora_B"}


def test_full_model_reloads_in_transformers_with_the_same_logits(base, tmp_path, random_examples):
    from transformers import AutoModelForCausalLM

    run = make_run(base, tmp_path / "out", lora=None)
    _, checkpoint = finish(run, batches(random_examples))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "latest")
    torch.testing.assert_close(again(IDS).logits, run._setup.policy.model(IDS).logits, rtol=0, atol=1e-6)
    assert (checkpoint.path / "tokenizer.json").exists()
    assert checkpoint.about.lora_rank is None


def test_versions_count_updates_and_latest_follows(base, tmp_path, random_examples):
    out = tmp_path / "out"
    updates, last = finish(make_run(base, out, save_every=2, epochs=2), batches(random_examples, 3))
    assert [update.report.update for update in updates] == [1, 2, 3, 4, 5, 6]
    assert sorted(os.listdir(out)) == ["latest", "v000004", "v000006"]
    assert (out / "latest").resolve().name == "v000006"
    assert last.about.consumed == ["g0", "g1", "g2"]
    assert last.about.done
    assert last.info.sha256 == checkpoints.weights_digest(last.path)


@pytest.mark.parametrize("lora", [4, None])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(base, tmp_path, random_examples, lora):
    _, whole = finish(make_run(base, tmp_path / "whole", lora=lora, save_every=1), batches(random_examples))

    def stopping():
        for number, batch in enumerate(batches(random_examples)):
            if number == 2:
                raise KeyboardInterrupt
            yield batch

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        finish(make_run(base, out, lora=lora, save_every=1), stopping())
    start = find_start(out, go_on_from=None, resume=True, options={"loss": "ppo"})
    assert start.consumed == ("g0", "g1")
    rest = [batch for batch in batches(random_examples) if batch.groups[0] not in start.consumed]
    updates, last = finish(make_run(base, out, start, lora=lora, save_every=1), rest)
    assert [update.report.update for update in updates] == [3, 4]
    assert_equal_weights(last.path, whole.path)
    assert last.about.consumed == whole.about.consumed


def test_going_on_from_a_checkpoint_keeps_weights_optimiser_and_version(base, tmp_path, random_examples):
    first, second = batches(random_examples)[:2], batches(random_examples)[2:]
    _, whole = finish(make_run(base, tmp_path / "whole"), first + second)
    out = tmp_path / "out"
    finish(make_run(base, out), first)
    start = find_start(out, go_on_from=out, resume=False, options={})
    assert start.consumed == ()
    _, last = finish(make_run(base, out, start), second)
    assert last.about.version == 4
    assert last.about.start_version == 2
    assert_equal_weights(last.path, whole.path)
    elsewhere = tmp_path / "fresh"
    start = find_start(elsewhere, go_on_from=out / "v000002", resume=False, options={})
    _, other = finish(make_run(base, elsewhere, start, fresh_optimizer=True), second)
    assert other.about.version == 4
    with pytest.raises(AssertionError):
        assert_equal_weights(other.path, whole.path)


def test_nothing_to_train_on_still_leaves_a_checkpoint(base, tmp_path):
    run = make_run(base, tmp_path / "out")
    updates, last = finish(run, [])
    assert updates == []
    assert last.path.name == "v000000"
    start = find_start(tmp_path / "out", go_on_from=tmp_path / "out", resume=False, options={})
    _, again = finish(make_run(base, tmp_path / "out", start), [Batch([], ["x"])])
    assert again.path.name == "v000000"
    assert again.about.consumed == ["x"]


def test_weights_are_never_overwritten_unasked(base, tmp_path):
    out = tmp_path / "out"
    finish(make_run(base, out), [])
    with pytest.raises(UsageError, match="holds version 0 already"):
        find_start(out, go_on_from=None, resume=False, options={})
    with pytest.raises(UsageError, match="with loss ppo, not sft"):
        find_start(out, go_on_from=None, resume=True, options={"loss": "sft"})
    # With --from as well it is the next turn of a loop, since the run there is done; unless it is not.
    assert not find_start(out, go_on_from=out, resume=True, options={"loss": "sft"}).is_resumed
    assert find_start(out, go_on_from=out, resume=True, options={"loss": "ppo"}).is_resumed
    unfinished = find_checkpoint(out)
    unfinished.about.done = False
    checkpoints.rewrite_about(unfinished)
    with pytest.raises(UsageError, match="with loss ppo, not sft"):
        find_start(out, go_on_from=out, resume=True, options={"loss": "sft"})
    with pytest.raises(UsageError, match="no checkpoint"):
        find_start(out, go_on_from=tmp_path / "elsewhere", resume=False, options={})
    empty = tmp_path / "new"
    assert find_start(empty, go_on_from=empty, resume=False, options={}) == Start()
    assert find_start(empty, go_on_from=None, resume=True, options={}) == Start()


def test_another_rank_or_base_is_refused(base, tmp_path, tiny_llama):
    out = tmp_path / "out"
    finish(make_run(base, out), [])
    start = find_start(out, go_on_from=out, resume=False, options={})
    with pytest.raises(UsageError, match=r"--lora 8, but .* LoRA rank 4"):
        Opener(SetupOptions(str(base), LoraOptions(8), start=start.checkpoint, lora_given=True)).setup()
    with pytest.raises(UsageError, match=r"--lora 0, but .* LoRA rank 4"):
        Opener(SetupOptions(str(base), None, start=start.checkpoint, lora_given=True)).setup()
    other = tmp_path / "other"
    tiny_llama("float32", seed=7).save_pretrained(other)
    with pytest.raises(UsageError, match="another model"):
        Opener(SetupOptions(str(other), LoraOptions(4), start=start.checkpoint)).setup()


def test_unknown_targets_are_a_usage_error(base):
    with pytest.raises(UsageError, match="--lora-targets"):
        Opener(SetupOptions(str(base), LoraOptions(4, 8.0, ("no_such_layer",)))).setup()
    with pytest.raises(UsageError, match="lm_head"):
        Opener(SetupOptions(str(base), LoraOptions(4, 8.0, ("q_proj", "lm_head")))).setup()


def write(folder, version, content=b"weights", keep=0):
    def save(path):
        (path / "a.safetensors").write_bytes(content)

    checkpoint = write_checkpoint(folder, About(version, "m", "r"), {"state": {}}, save)
    keep_newest(folder, keep)
    return checkpoint


def test_keep_removes_the_oldest_and_never_the_latest(tmp_path):
    for version in range(1, 5):
        write(tmp_path, version, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "v000003", "v000004"]
    checkpoints.point_latest(tmp_path, "v000003")
    keep_newest(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "v000003", "v000004"]


def test_a_failed_write_leaves_the_old_checkpoint_and_nothing_else(tmp_path):
    write(tmp_path, 1)

    def fail(path):
        (path / "a.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    with pytest.raises(OutputFailed, match="No space left"):
        write_checkpoint(tmp_path, About(2, "m", "r"), None, fail)
    assert sorted(os.listdir(tmp_path)) == ["latest", "v000001"]
    assert find_checkpoint(tmp_path).about.version == 1


def test_leftovers_of_killed_runs_are_removed_and_never_read(tmp_path):
    write(tmp_path, 1)
    (tmp_path / ".v000002.abc.part").mkdir()
    (tmp_path / ".latest.1.part").symlink_to("v000002")
    assert find_checkpoint(tmp_path).about.version == 1
    write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "v000001", "v000002"]


def test_the_same_version_is_replaced(tmp_path):
    write(tmp_path, 1, b"old")
    again = write(tmp_path, 1, b"new")
    assert (again.path / "a.safetensors").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["latest", "v000001"]


def test_files_have_ordinary_modes(tmp_path):
    checkpoint = write(tmp_path, 1)
    umask = os.umask(0)
    os.umask(umask)
    assert (checkpoint.path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert checkpoint.path.stat().st_mode & 0o777 == 0o777 & ~umask


def test_damaged_files_are_bad_data(tmp_path):
    checkpoint = write(tmp_path, 1)
    (checkpoint.path / "optimizer.pt").write_bytes(b"not a zip")
    with pytest.raises(DataError, match="not an optimiser state"):
        find_checkpoint(tmp_path).optimizer_state()
    (checkpoint.path / "strop.json").write_text("{}")
    with pytest.raises(DataError, match=r"strop\.json"):
        find_checkpoint(tmp_path)


def test_a_gradient_that_is_not_finite_is_never_applied(base, tmp_path, random_examples):
    some = batches(random_examples, 2)
    some[1].examples[0].sequences[0].advantages[0] = float("inf")
    run = make_run(base, tmp_path / "out", loss=LossOptions("reinforce"), save_every=1)
    with pytest.raises(DataError, match=r"update 2 .*g1.* is not finite"):
        finish(run, some)
    assert find_checkpoint(tmp_path / "out").about.version == 1
