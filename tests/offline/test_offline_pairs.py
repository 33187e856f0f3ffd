"""A pairs file becomes exactly what the training of an offline stage reads."""

from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.data.images import decode_pngs, encode_pngs
from ebbflow.data.pairs import LATENTS, PairError, read_pairs
from ebbflow.data.prompts import read_prompts
from ebbflow.data.schema import ADVANTAGES, PROMPTS, build_rollout_schema
from ebbflow.models.glyph_training.lettering import render_text
from ebbflow.offline import pairs
from ebbflow.offline.pairs import NOT_OURS, import_pairs, import_pairs_from_folder
from ebbflow.offline.shards import read_latents
from ebbflow.offline.training import train_epochs
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.tables import read_column, read_table, read_table_metadata, write_table
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

WORDS = ["GATE", "LAMP", "GATE", "RIVE", "MOON"]


@pytest.fixture
def ctx(make_recipe):
    return StageContext(make_recipe(offline={"shards": 2, "micro_batch": 4}), round=0, stage=1)


def picture(text, height=16, width=32):
    return np.repeat(render_text(text, height, width)[..., None], 3, axis=2)


def png(image):
    return encode_pngs(image[None])[0]


def image_rows(words=WORDS):
    """Each word spelt right and spelt backwards."""
    return [
        {"prompt": f'"{word}"', "chosen": png(picture(word)), "rejected": png(picture(word[::-1]))}
        for word in words
    ]


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def by_key(imported, latent_shape):
    """(prompt_id, sample) -> (latent, image, advantage)."""
    found = {}
    advantages = {}
    for row in read_table(imported.advantages, ADVANTAGES).to_pylist():
        advantages[row["prompt_id"], row["sample"]] = row["advantage"]
    for path in imported.rollouts:
        table = read_table(path, build_rollout_schema(latent_shape))
        assert set(table["policy_version"].to_pylist()) == {NOT_OURS}
        images = decode_pngs(table["image"].to_pylist())
        for index, key in enumerate(
            zip(table["prompt_id"].to_pylist(), table["sample"].to_pylist(), strict=True)
        ):
            assert key not in found
            found[key] = (read_latents(path)[index], images[index], advantages[key])
    assert found.keys() == advantages.keys()
    return found


def test_every_pair_is_a_group_of_its_own(ctx, model, tmp_path):
    imported = import_pairs(
        ctx, model, write(tmp_path / "p.parquet", image_rows()), tmp_path / "out"
    )
    prompts = read_prompts(imported.prompts, "train")
    assert read_table(imported.prompts, PROMPTS).num_rows == 5
    assert {prompt.prompt_id: prompt.prompt for prompt in prompts} == {
        i: f'"{word}"' for i, word in enumerate(WORDS)
    }
    samples = by_key(imported, model.latent_shape)
    assert samples.keys() == {(number, sample) for number in range(5) for sample in (0, 1)}
    for (number, sample), (latent, image, advantage) in samples.items():
        word = WORDS[number] if sample == 0 else WORDS[number][::-1]
        assert advantage == (1 if sample == 0 else -1)
        assert np.array_equal(image, picture(word))
        assert np.array_equal(model.decode_latents(latent[None])[0], picture(word))
    assert len(imported.rollouts) == 2
    sizes = [read_table(path).num_rows for path in imported.rollouts]
    assert sizes == [6, 4]
    assert (imported.pairs, imported.ties, imported.ignored) == (5, 0, [])


@pytest.mark.parametrize("flat", [True, False])
def test_latents_are_kept_as_they_are(ctx, model, tmp_path, flat):
    latents = np.random.default_rng(0).normal(size=(3, 2, *model.latent_shape)).astype(np.float32)
    rows = [
        {
            "prompt": "AB",
            **dict(
                zip(
                    LATENTS, (side.ravel() if flat else side.tolist() for side in pair), strict=True
                )
            ),
            "by": "x",
        }
        for pair in latents
    ]
    imported = import_pairs(ctx, model, write(tmp_path / "p.parquet", rows), tmp_path / "out")
    for (number, sample), (latent, image, _) in by_key(imported, model.latent_shape).items():
        assert np.array_equal(latent.numpy(), latents[number, sample])
        assert np.array_equal(image, model.decode_latents(latent[None])[0])
    assert imported.ignored == ["by"]
    assert (
        str(imported)
        == "p.parquet: pairs to train on: 3; left out: ties 0, on prompts of the evaluation 0;"
        " ignored columns: by"
    )


def test_ties_are_left_out_and_counted(ctx, model, tmp_path):
    rows = image_rows()
    rows[1]["rejected"] = rows[1]["chosen"]
    with pytest.warns(
        UserWarning, match=r"of 5 pairs left out: 1 with the same chosen and rejected side"
    ):
        imported = import_pairs(ctx, model, write(tmp_path / "p.parquet", rows), tmp_path / "out")
    assert {number for number, _ in by_key(imported, model.latent_shape)} == {0, 2, 3, 4}
    assert (imported.pairs, imported.ties, imported.evaluated) == (4, 1, 0)


def test_pairs_on_prompts_of_the_evaluation_are_left_out_and_counted(
    ctx, base_folder, make_prompts, tmp_path
):
    rows = image_rows()
    prompts = make_prompts(3, split="held_out")
    rows[2]["prompt"] = prompts[0].prompt
    # Another spelling of the same prompt is the same prompt.
    rows[4]["prompt"] = make_prompts(1)[0].prompt.replace('"', "“").upper() + "."
    table = tmp_path / "prompts.parquet"
    mixed = [asdict(prompt) for prompt in prompts] + [
        asdict(replace(prompts[0], prompt_id=9, prompt="QQ", split="train"))
    ]
    write_table(table, PROMPTS, [pa.RecordBatch.from_pylist(mixed, PROMPTS)], {})
    source = write(tmp_path / "p.parquet", rows)
    with pytest.warns(
        UserWarning, match=r"of 5 pairs left out: 2 on prompts that the run is evaluated on"
    ):
        imported = import_pairs_from_folder(ctx, base_folder, table, source, tmp_path / "out")
    assert (imported.pairs, imported.ties, imported.evaluated) == (3, 0, 2)
    assert {
        number
        for path in imported.rollouts
        for number in read_column(path, "prompt_id").to_pylist()
    } == {0, 1, 3}


def test_nothing_but_ties_is_refused(ctx, model, tmp_path):
    rows = [row | {"rejected": row["chosen"]} for row in image_rows()]
    with pytest.raises(
        PairError, match=r"p.parquet: no pair is left to learn from: 5 with the same"
    ):
        import_pairs(ctx, model, write(tmp_path / "p.parquet", rows), tmp_path / "out")


def test_fewer_pairs_than_shards_leave_no_shard_empty(make_recipe, model, tmp_path):
    ctx = StageContext(make_recipe(offline={"shards": 4}), 0, 1)
    imported = import_pairs(
        ctx, model, write(tmp_path / "p.parquet", image_rows()[:3]), tmp_path / "out"
    )
    assert [read_table(path).num_rows for path in imported.rollouts] == [2, 2, 2]


@pytest.mark.any_cpu
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 4, 64])
def test_a_pair_goes_into_the_shard_of_its_number_and_images_are_read_once(
    make_recipe, model, tmp_path, monkeypatch, shards, micro_batch
):
    ctx = StageContext(make_recipe(offline={"shards": shards, "micro_batch": micro_batch}), 0, 1)
    rows = image_rows([*WORDS, *WORDS])
    rows[3]["rejected"] = rows[3]["chosen"]
    read = []
    iterate = pq.ParquetFile.iter_batches

    def counting(file, *args, **kwargs):
        read.append(kwargs["columns"])
        return iterate(file, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting)
    with pytest.warns(UserWarning, match="1 with the same"):
        imported = import_pairs(ctx, model, write(tmp_path / "p.parquet", rows), tmp_path / "out")
    assert read == [["prompt"], ["prompt", "chosen", "rejected"]]
    for shard, path in enumerate(imported.rollouts):
        mine = [number for number in range(shard, 10, shards) if number != 3]
        assert read_column(path, "prompt_id").to_pylist() == [
            number for number in mine for _ in range(2)
        ]
        assert read_table_metadata(path)["shard"] == shard
    assert len(imported.rollouts) == shards


def test_what_does_not_fit_the_model_is_named(ctx, model, tmp_path):
    rows = image_rows()
    rows[3]["rejected"] = png(picture("ABCD", 16, 40))
    with pytest.raises(
        PairError,
        match=r"row 4: rejected is 40 pixels wide and 16 high, .* images of 32 by 16; resize it",
    ):
        import_pairs(ctx, model, write(tmp_path / "p.parquet", rows), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*rollouts*"))
    short = [{"prompt": "AB", LATENTS[0]: [0.5] * 512, LATENTS[1]: [0.5] * 511}]
    with pytest.raises(
        PairError,
        match=(
            r"row 1: rejected_latent has 511 numbers, and a latent of this model 512, shape \(1,"
            r" 16, 32\)"
        ),
    ):
        import_pairs(ctx, model, write(tmp_path / "p.parquet", short), tmp_path / "out")


def test_memory_is_bounded_by_a_micro_batch_for_every_shard(ctx, model, tmp_path, monkeypatch):
    read = []
    encoded = []
    held = []

    def reading(path):
        for pair in read_pairs(path):
            read.append(pair.number)
            held.append(2 * len(read) - sum(encoded))
            yield pair

    def encoding(images):
        encoded.append(len(images))
        return type(model).encode_images(model, images)

    monkeypatch.setattr(pairs, "read_pairs", reading)
    monkeypatch.setattr(model, "encode_images", encoding)
    import_pairs(ctx, model, write(tmp_path / "p.parquet", image_rows(WORDS * 3)), tmp_path / "out")
    assert max(encoded) == 4
    assert sum(encoded) == 30
    assert max(held) <= 2 * 4


def test_a_prompt_that_is_wrong_stops_before_anything_is_encoded(ctx, model, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "encode_images", lambda images: pytest.fail("encoded"))
    rows = [*image_rows(), {"prompt": "", "chosen": b"", "rejected": b""}]
    with pytest.raises(PairError, match="row 6: '' is no prompt"):
        import_pairs(ctx, model, write(tmp_path / "p.parquet", rows), tmp_path / "out")


def test_the_same_file_gives_the_same_tables(ctx, model, tmp_path):
    source = write(tmp_path / "p.parquet", image_rows())
    one, two = (import_pairs(ctx, model, source, tmp_path / name) for name in ("one", "two"))
    assert len(one.rollouts) == len(two.rollouts) == 2
    tables = [
        (one.prompts, two.prompts),
        (one.advantages, two.advantages),
        *zip(one.rollouts, two.rollouts, strict=True),
    ]
    for first, second in tables:
        assert read_table(first).equals(read_table(second))


def trained_on_pairs(make_recipe, model, folder, rows, algorithm, **stage):
    """Metrics of every optimiser step, and the stage's record."""
    small = {"shards": 2, "epochs": 1, "batch_size": 8, "micro_batch": 8}
    ctx = StageContext(
        make_recipe(offline=small | stage | {"algorithm": {"name": algorithm}}), 0, 1
    )
    imported = import_pairs(ctx, model, write(folder / "p.parquet", rows), folder / "out")
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    recorder = MetricsRecorder()
    record = train_epochs(
        ctx,
        model,
        PolicyUpdater(policy, ctx.offline_config),
        read_prompts(imported.prompts, "train"),
        imported.rollouts,
        imported.advantages,
        recorder,
    )
    return recorder.metrics_rows, record


@pytest.mark.parametrize(
    "algorithm", ["diffusion_dpo", "diffusion_nft", "awm", "dgpo", "crd", "sft", "rwr"]
)
def test_every_forward_algorithm_trains_on_pairs(make_recipe, model, tmp_path, algorithm):
    logged, record = trained_on_pairs(
        make_recipe, model, tmp_path, image_rows(WORDS[:4]), algorithm
    )
    assert record.samples == 8
    assert record.optimizer_steps == len(logged) >= 1
    assert record.seconds.keys() == {"rollout", "import", "training"}
    assert record.seconds["rollout"] == 0
    assert all(np.isfinite(value) for metrics in logged for value in metrics.values())


def test_preference_training_learns_which_side_was_chosen(make_recipe, model, tmp_path):
    logged, _ = trained_on_pairs(
        make_recipe,
        model,
        tmp_path,
        image_rows(WORDS[:4]),
        "diffusion_dpo",
        epochs=20,
        optimizer={"lr": 1e-3},
        drift_alarm=100,
    )
    assert [metrics["dpo/margin"] for metrics in logged[:1]] == pytest.approx(
        [0], abs=1e-6
    )  # it starts at the reference
    late = logged[-10:]
    assert np.mean([metrics["dpo/accuracy"] for metrics in late]) > 0.9
    assert np.mean([metrics["dpo/margin"] for metrics in late]) > 0
