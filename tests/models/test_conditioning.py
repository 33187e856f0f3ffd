"""Encoded prompts: their rows, and that each prompt is encoded once, for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline_cases import (
    LONG,
    NEWER_FAMILIES_IN_TEST_ALL,
    NEWEST_FAMILIES_IN_TEST_ALL,
    SHORT,
    TINY,
    few_tokens,
    guided,
    picture,
    prompts,
)

from ebbflow.data.prompt_windows import PromptWindow
from ebbflow.data.prompts import Prompt
from ebbflow.models import Conditioning, ModelError, encoding
from ebbflow.models.base import predict
from ebbflow.models.encoding import (
    PromptWindows,
    build_prompt_lookup,
    embed_prompts,
    open_embeddings,
    write_embeddings,
)


def given(count, length, negative=None, start=0):
    """Rows that name themselves: the embeddings of row i are all i + 1."""
    number = start + 1 + torch.arange(count)
    embeds = number.view(-1, 1, 1).expand(count, length, 2).float()
    tensors = {
        "embeds": embeds,
        "pooled": number.view(-1, 1).expand(count, 3).float(),
        "mask": torch.ones(count, length).bool(),
    }
    return Conditioning(tensors | {"time": number}, negative, guidance=3.0)


def same(one, other):
    if one.negative is None or other.negative is None:
        assert one.negative is other.negative
    else:
        same(one.negative, other.negative)
    assert one.guidance == other.guidance
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one[name], other[name]) for name in one.tensors)
    return True


def test_rows_are_taken_everywhere_in_the_order_asked_for():
    conditioning = given(4, 5, negative=given(4, 3, start=10))
    assert len(conditioning) == 4
    some = conditioning.select_rows(torch.tensor([2, 0, 2]))
    assert len(some) == 3
    assert some["pooled"][:, 0].tolist() == [3, 1, 3]
    assert some["time"].tolist() == [3, 1, 3]
    assert some.negative["embeds"][:, 0, 0].tolist() == [13, 11, 13]
    assert same(
        conditioning.select_rows(slice(1, 3)), conditioning.select_rows(torch.tensor([1, 2]))
    )
    assert some.guidance == 3


def test_parts_are_joined_and_shorter_prompts_padded():
    parts = [given(2, 5, given(2, 1, start=10)), given(1, 2, given(1, 4, start=12), start=2)]
    joined = Conditioning.concatenate(parts)
    assert (len(joined), joined.guidance) == (3, 3)
    assert joined["embeds"].shape == (3, 5, 2)
    assert joined["embeds"][2, :, 0].tolist() == [3, 3, 0, 0, 0]
    assert joined["mask"].dtype == torch.bool
    assert joined["mask"].sum(1).tolist() == [5, 5, 2]
    assert joined["pooled"].shape == (3, 3)
    assert joined["time"].tolist() == [1, 2, 3]
    assert joined.negative["mask"].sum(1).tolist() == [1, 1, 4]
    assert same(Conditioning.concatenate([given(2, 5)]), given(2, 5))


def test_the_negative_prompts_go_and_the_guidance_stays():
    alone = given(2, 3, given(2, 3)).without_guidance()
    assert alone.negative is None
    assert alone.guidance == 3
    assert same(alone, given(2, 3))


def test_conditioning_moves_with_its_negative():
    moved = given(2, 3, given(2, 3)).to(torch.device("meta"))
    assert moved.device == moved.negative.device == torch.device("meta")
    assert {
        values.device.type for values in (*moved.tensors.values(), *moved.negative.tensors.values())
    } == {"meta"}


@pytest.mark.parametrize("name", NEWEST_FAMILIES_IN_TEST_ALL)
def test_a_prompt_is_encoded_alike_in_any_company(tiny, monkeypatch, name):
    model = tiny(name, **few_tokens(name))
    wanted = prompts(name, (*SHORT, LONG[:200]))
    monkeypatch.setattr("ebbflow.models.pipeline.ENCODED_AT_ONCE", 3)
    together = model.encode_prompts(wanted)
    assert len(together) == 4
    assert (together.negative is None) == (not guided(name))
    for row, prompt in enumerate(wanted):
        alone = model.encode_prompts([prompt])
        row_of_all = together.select_rows(slice(row, row + 1))
        for one, other in [(alone, row_of_all)] + (
            [(alone.negative, row_of_all.negative)] if guided(name) else []
        ):
            for key, values in one.tensors.items():
                length = values.shape[1]
                assert torch.allclose(other[key][:, :length].float(), values.float(), atol=1e-5), (
                    key
                )
                assert not other[key][:, length:].any()


@pytest.mark.parametrize("name", [*(name for name in TINY if guided(name)), "sana"])
def test_negative_prompts_can_be_asked_for_without_guidance(tiny, name):
    """As guidance encodes them; a pass without guidance does not look at them."""
    model = tiny(name, guidance=1.0)
    wanted = prompts(name)
    asked = embed_prompts(model, wanted, negatives=True)(wanted)
    guided = tiny(name).encode_prompts(wanted)
    assert asked.guidance == 1
    for one, other in ((asked, guided), (asked.negative, guided.negative)):
        for key, values in one.tensors.items():
            assert torch.allclose(values.float(), other[key].float(), atol=1e-5), key
    latents = torch.randn(len(wanted), *model.latent_shape)
    sigma = torch.full((len(wanted),), 0.5)
    plain, with_negatives = (
        predict(model, latents, sigma, each) for each in (asked.without_guidance(), asked)
    )
    assert torch.equal(plain, with_negatives)
    full = predict(model, latents, sigma, replace(asked, guidance=guided.guidance))
    assert torch.allclose(full, predict(model, latents, sigma, guided), atol=1e-4)
    assert not torch.allclose(full, plain, atol=1e-3)


def test_a_family_without_guidance_has_no_negative_prompts(tiny):
    with pytest.raises(
        ModelError,
        match=(
            r"reference.guidance needs classifier-free guidance, which FluxModel has not; set it"
            r" to 1"
        ),
    ):
        embed_prompts(tiny("flux", guidance=1.0), prompts("flux"), negatives=True)


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_without_guidance_no_negative_prompt_is_encoded(tiny, name):
    conditioning = tiny(name, guidance=1.0).encode_prompts(prompts(name))
    assert conditioning.negative is None
    assert conditioning.guidance == 1


def test_every_different_prompt_is_encoded_once(tiny):
    model = tiny("qwen_image_edit")
    calls = []

    class Counting:
        transformer = model.transformer

        def encode_prompts(self, wanted):
            calls.append(list(wanted))
            return model.encode_prompts(wanted)

    first, second = prompts("qwen_image_edit", SHORT[:2])
    other_image = replace(first, image=picture(48, 48, seed=9))
    other_negative = replace(first, negative_prompt="grey")
    renumbered = replace(first, prompt_id=7, target="A")
    look_up = build_prompt_lookup(
        Counting(), iter([first, second, first, renumbered, other_image, other_negative])
    )
    assert len(calls) == 1
    assert len(calls[0]) == 4
    looked_up = look_up([second, renumbered, other_image, other_negative, second])
    assert len(calls) == 1
    assert same(looked_up, look_up([second, first, other_image, other_negative, second]))
    expected = model.encode_prompts([second, first, other_image, other_negative, second])
    for key, values in looked_up.tensors.items():
        assert torch.allclose(values.float(), expected[key].float(), atol=1e-5)
    assert not torch.allclose(looked_up["image"][1], looked_up["image"][2], atol=1e-2)
    assert not torch.allclose(
        looked_up.negative["embeds"][1], looked_up.negative["embeds"][3], atol=1e-2
    )
    with pytest.raises(KeyError):
        look_up([replace(first, prompt="never seen")])


class Lengths:
    """A model whose prompts are as long as their text, and tell who encoded them when."""

    guided = True
    transformer = torch.nn.Linear(1, 1)

    def __init__(self):
        self.calls = []

    def encode_prompts(self, wanted):
        self.calls.append([prompt.prompt for prompt in wanted])
        length = max(len(prompt.prompt) for prompt in wanted)
        embeds = torch.zeros(len(wanted), length, 2, dtype=torch.bfloat16)
        mask = torch.zeros(len(wanted), length, dtype=torch.bool)
        for row, prompt in enumerate(wanted):
            mask[row, : len(prompt.prompt)] = True
            embeds[row, : len(prompt.prompt)] = prompt.prompt_id + 1
        pooled = torch.tensor([[float(prompt.prompt_id)] for prompt in wanted]).expand(-1, 3)
        return Conditioning(
            {"embeds": embeds, "mask": mask, "pooled": pooled, "time": pooled[:, 0]}, guidance=4.5
        )


LENGTHS = (3, 1, 2, 7, 4)
TEXTS = [
    Prompt(number, "x" * length, "n", None, "", "train", "{}")
    for number, length in enumerate(LENGTHS)
]


def test_prompts_in_several_files_are_padded_as_if_they_were_in_one(monkeypatch):
    model = Lengths()
    wanted = [TEXTS[row] for row in (4, 0, 3, 3, 1)]
    together = embed_prompts(model, TEXTS, negatives=True)(wanted)
    monkeypatch.setattr(encoding, "PROMPTS_PER_FILE", 2)
    from_several_files = embed_prompts(model, TEXTS, negatives=True)(wanted)
    assert same(from_several_files, together)
    assert from_several_files["embeds"].dtype == torch.bfloat16
    assert from_several_files["embeds"].shape == (5, 7, 2)
    assert from_several_files["mask"].sum(1).tolist() == [4, 3, 7, 7, 1]
    assert from_several_files["time"].tolist() == [4, 0, 3, 3, 1]
    assert [len(call) for call in model.calls] == [5, 5, 2, 2, 2, 2, 1, 1]


def test_every_process_encodes_its_own_files_and_reads_all(monkeypatch, tmp_path):
    monkeypatch.setattr(encoding, "PROMPTS_PER_FILE", 2)
    models = [Lengths(), Lengths()]
    for rank, model in enumerate(models):
        assert write_embeddings(model, [*TEXTS, TEXTS[0]], tmp_path, rank=rank, world=2) == TEXTS
    assert [len(model.calls) for model in models] == [2, 1]
    assert same(open_embeddings(tmp_path, TEXTS)(TEXTS), embed_prompts(Lengths(), TEXTS)(TEXTS))


def test_embeddings_are_on_the_disk_and_their_files_have_no_name(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    embeddings = embed_prompts(Lengths(), TEXTS)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    assert any(line.endswith("0.safetensors (deleted)") for line in mapped)
    assert embeddings(TEXTS)["time"].tolist() == [0, 1, 2, 3, 4]


def test_a_window_is_padded_to_its_own_longest_prompt_and_forgotten_after_its_steps():
    model = Lengths()
    windows = PromptWindows(
        [
            PromptWindow(range(2), lambda: TEXTS[:3]),
            PromptWindow(range(2, 4), lambda: TEXTS[2:]),
        ]
    )

    def encode(steps):
        for window in windows.list_missing(steps):
            windows.add(window, embed_prompts(model, window.list_prompts()))

    encode(range(1))
    encode(range(2))
    assert len(model.calls) == 1
    encode(range(1, 3))
    # The third prompt is in both windows, whose longest prompts have 3 and 7 tokens.
    assert windows(1, [TEXTS[2]])["mask"].shape == (1, 3)
    assert windows(2, [TEXTS[2]])["mask"].shape == (1, 7)
    encode(range(3, 9))
    assert [len(call) for call in model.calls] == [3, 3]
    with pytest.raises(AssertionError, match="prompts of step 1 are not encoded"):
        windows(1, [TEXTS[2]])


def test_late_prompts_are_padded_by_themselves_until_the_next_windows_are_listed():
    model = Lengths()
    windows = PromptWindows([PromptWindow(range(4), lambda: TEXTS[:3])], negative_gradient=False)
    (window,) = windows.list_missing(range(1))
    windows.add(window, embed_prompts(model, window.list_prompts()))
    asked = [TEXTS[2], TEXTS[4]]
    assert windows.find_embeddings(1, asked) is None
    windows.add_late(embed_prompts(model, asked))
    conditioning = windows(1, asked)
    assert conditioning["mask"].shape == (2, 4)
    assert not conditioning.negative_gradient
    # What the window has comes from the window, also if it is among the late prompts.
    assert windows(1, [TEXTS[2]])["mask"].shape == (1, 3)
    assert windows.list_missing(range(1, 2)) == []
    assert windows.find_embeddings(1, asked) is None


def test_an_image_to_edit_is_needed_and_all_need_one_size(tiny, monkeypatch):
    model = tiny("qwen_image_edit")
    (square,), (wide,) = (
        prompts("qwen_image_edit", SHORT[:1], size=size) for size in ((48, 48), (96, 48))
    )
    with pytest.raises(
        ModelError, match=r"prompt 3 \('a sign .*'\) has no image to edit; add a column 'image'"
    ):
        model.encode_prompts([square, replace(square, prompt_id=3, image=None)])
    monkeypatch.setattr("ebbflow.models.pipeline.ENCODED_AT_ONCE", 1)
    with pytest.raises(
        ModelError, match=r"different sizes \(64 x 64 of prompt 0, 96 x 32 of prompt 4\); crop them"
    ):
        model.encode_prompts([square, replace(wide, prompt_id=4)])
    assert len(model.encode_prompts([wide, wide])) == 2
