"""Images of a dataset: their files, pixels and places in messages."""

import io
from typing import Any

import pytest
from PIL import Image

from rloo_pipeline.artifacts.image_store import decode, digest
from rloo_pipeline.data.images import check_named, images_of, with_parts
from rloo_pipeline.errors import UserError

RED = (200, 10, 20)


def png(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def test_a_file_its_path_and_its_pixels_are_one_image(tmp_path) -> None:
    image = Image.new("RGB", (3, 2), RED)
    (tmp_path / "a.png").write_bytes(png(image))
    stored = [{"bytes": png(image), "path": "elsewhere.png"}, {"bytes": None, "path": str(tmp_path / "a.png")}, image]
    files = [file for file, _ in images_of(stored, "a row")]
    assert len({digest(file) for file in files}) == 1
    assert decode(files[0], "a row").getpixel((2, 1)) == RED
    assert images_of(None, "a row") == []
    assert [file for file, _ in images_of(image, "a row")] == files[:1]


def test_pixels_are_rgb_and_upright() -> None:
    turned = Image.new("RGBA", (4, 2), (*RED, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the EXIF tag says that the image is rotated
    file = png(turned, exif=exif)
    with Image.open(io.BytesIO(file)) as opened:
        for stored in ({"bytes": file, "path": None}, opened):
            [(_, shown)] = images_of(stored, "a row")
            assert (shown.mode, shown.size) == ("RGB", (2, 4))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cat.png", r"^a row holds 'cat\.png'; an image is a datasets\.Image"),
        ({"bytes": b"no image", "path": None}, r"^a row: PIL cannot read the image"),
        ({"bytes": None, "path": "/missing.png"}, r"^a row: the image /missing\.png cannot be read"),
        ({"bytes": png(Image.new("1", (20_000, 10_000))), "path": None}, r"PIL cannot read the image.*bomb"),
    ],
)
def test_what_is_not_an_image_gives_a_one_line_error(value, message) -> None:
    with pytest.raises(UserError, match=message):
        images_of(value, "a row")


def test_pixels_that_cannot_be_read_or_would_be_clipped_are_refused(tmp_path) -> None:
    (tmp_path / "cut.png").write_bytes(png(Image.effect_noise((64, 64), 9))[:2000])
    deep = Image.new("I;16", (2, 2), 30_000)
    with Image.open(tmp_path / "cut.png") as cut:
        for image in (cut, Image.new("RGB", (0, 9)), deep, {"bytes": png(deep), "path": None}, Image.new("F", (2, 2))):
            with pytest.raises(UserError, match=r"^a row: PIL cannot read the image \("):
                images_of(image, "a row")


def test_a_rotated_photo_whose_exif_data_are_damaged_is_refused() -> None:
    """PIL writes these data again when it rotates."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), RED).save(buffer, "JPEG", exif=exif)
    maker, width = b"\x01\x0f\x00\x02", b"\x01\x00\x00\x02"  # as texts
    assert buffer.getvalue().count(maker) == 1
    with pytest.raises(UserError, match=r"^a row: PIL cannot read the image \("):
        images_of({"bytes": buffer.getvalue().replace(maker, width), "path": None}, "a row")


def test_images_stand_before_the_first_message_of_the_user() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    parts = with_parts(messages, 2, "a row")
    assert parts[0]["content"] == [{"type": "text", "text": "Be brief."}]
    assert [part["type"] for part in parts[1]["content"]] == ["image", "image", "text"]
    assert with_parts(messages, 0, "a row")[1]["content"] == [{"type": "text", "text": "What?"}]


def test_images_stay_where_the_messages_have_them() -> None:
    content = [{"type": "text", "text": "Is"}, {"type": "image", "text": None}, {"type": "text", "text": "red?"}]
    assert with_parts([{"role": "user", "content": content}], 1, "a row")[0]["content"] == [
        {"type": "text", "text": "Is"},
        {"type": "image"},
        {"type": "text", "text": "red?"},
    ]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a text", r"^a row: a prompt with images must be messages; set dataset\.user_prompt"),
        ([{"role": "system", "content": "x"}], r"^a row: a prompt with images needs a user message"),
        *(
            (
                [{"role": "user", "content": content}],
                r"^a row: a message has the content .*; it must be a string, or parts",
            )
            for content in (["x"], [{"text": "x"}], {"text": "x"})
        ),
        ([{"role": "user", "content": [{"type": "image"}] * 2}], r"^a row: .* places for 2 images but the row has 1"),
    ],
)
def test_a_prompt_without_a_place_for_its_images_gives_a_one_line_error(prompt, message) -> None:
    with pytest.raises(UserError, match=message):
        with_parts(prompt, 1, "a row")


def test_images_that_no_key_names_are_not_overlooked() -> None:
    image = {"bytes": b"", "path": None}
    check_named([{"image": "a description", "images": []}, {"image": None}], "a.parquet")
    for row in ({"image": image}, {"images": [image]}):
        with pytest.raises(UserError, match=r"^a\.parquet: column 'images?' has images .* set dataset\.image_column"):
            check_named([{}, row], "a.parquet")
