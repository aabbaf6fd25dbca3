"""Dockerfiles, read as Docker reads them and refused at their line."""

from __future__ import annotations

import hashlib
import io
import tarfile
import time

import pytest

from rollout import image_names
from sandbox.errors import ImageError
from sandbox.images.dockerfile import context as image_context
from sandbox.images.dockerfile import image_name, lines, load, source, words
from sandbox.images.dockerfile.builder import local_name
from tests.helpers.dockerfiles import refused, steps

pytestmark = pytest.mark.apptainer


def test_continuations_comments_and_heredocs_are_those_of_docker():
    text = (
        "# syntax=docker/dockerfile:1\n"
        "# escape=`\n"
        "\n"
        "from base as One\n"
        "RUN a `  \n"
        "  # said within\n"
        "\n"
        "  && b \\\n"
        "RUN cat <<EOF && cat 3<<-'X Y'\n"
        "# no comment\n"
        "EOF\n"
        "\tline\n"
        "\tX Y\n"
        'COPY ["a b", "/c"]\r\n'
    )
    start, run, docs, copy = lines.parse(text)
    assert (start.keyword, start.rest, start.place) == ("FROM", "base as One", "Dockerfile:4")
    assert (run.rest, run.place) == ("a   && b \\", "Dockerfile:5")
    assert [(doc.name, doc.content, doc.expand) for doc in docs.heredocs] == [
        ("EOF", "# no comment\n", True),
        ("X Y", "\tline\n", False),
    ]
    assert copy.array() == ["a b", "/c"]
    assert [line.keyword for line in lines.parse("FROM base\n\\\n")] == ["FROM"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$X/${X}", "x/x"),
        ("${NO:-d}${X:+s}${E:-e}${E-kept}${NO+n}${E+set}", "dseset"),
        ("'$X' \"$X '\\$X' \\n\"", "$X x '$X' \\n"),
        ("\\$X \\a $ $$", "$X a $ "),
        ('${NO:-${X:-"a b"}}', "x"),
        ('${NO:-"a b"}', "a b"),
    ],
)
def test_variables_are_replaced_as_docker_does(text, value):
    assert words.expand(text, {"X": "x", "E": ""}) == value


@pytest.mark.parametrize("text", ["${X", "${}", "'a", '"a', "${X#a}", "${NO?gone}", "${X/a/b}"])
def test_what_docker_refuses_in_words_or_is_not_known_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        words.expand(text, {"X": "x"})


def test_arguments_and_environment_have_the_scopes_of_docker(context):
    directory = context(
        "ARG V=3\n"
        "ARG W=$V.1\n"
        "FROM base AS first\n"
        "ARG V\n"
        "ARG OWN=own\n"
        "ENV A=1 B=$A$V 'C'=\"two words\" D=a\\ b\n"
        "ENV OLD one  two\n"
        "ENV OWN=env\n"
        "WORKDIR /srv\n"
        "WORKDIR $OWN\n"
        "FROM first\n"
        'SHELL ["/bin/bash", "-ec"]\n'
        "ARG W\n"
        "RUN echo $W\n"
    )
    run = steps(directory, OWN="given")[-1]
    assert run["argv"] == ["/bin/bash", "-ec", "echo $W"]
    assert run["directory"] == "/srv/env"
    env = {name: run["env"].get(name) for name in ("A", "B", "C", "D", "OLD", "OWN", "V", "W")}
    assert env == {
        "A": "1",
        "B": "3",
        "C": "two words",
        "D": "a b",
        "OLD": "one  two",
        "OWN": "env",
        "V": None,
        "W": "3.1",
    }


@pytest.mark.parametrize(
    ("dockerfile", "line", "why"),
    [
        ("FROM base\nONBUILD RUN x", 2, "not supported"),
        ("FROM base\nFETCH x", 2, "not supported"),
        ("FROM base\n\nADD https://example.org/x /x", 3, "is not a file"),
        ("FROM base\nADD git@example.org:a/b.git /x", 2, "is not a file"),
        ("FROM base\nRUN --mount=type=secret,id=k x", 2, "--mount=type=secret,id=k is not supported"),
        ("FROM base\nRUN --network=host x", 2, "--network=host"),
        ("FROM base\nRUN <<..\n#!/bin/sh\n..\n", 2, "name of a script"),
        ("FROM base\nRUN <<a/b\n#!/bin/sh\na/b\n", 2, "name of a script"),
        ("FROM base\nRUN --security=insecure x", 2, "insecure"),
        ("FROM base\nCOPY --parents a b", 2, "--parents"),
        ("FROM base\nCOPY --chmod=u+x Dockerfile /", 2, "--chmod"),
        ("FROM base\nCOPY gone /", 2, "there is no 'gone'"),
        ("FROM base\nCOPY ../../etc/passwd /", 2, "there is no"),
        ("FROM base\nCOPY --from=3 a /", 2, "no stage 3"),
        ("FROM /etc", 1, "not the name of an image"),
        ("FROM ../x", 1, "not the name of an image"),
        ("FROM --platform=linux/s390x base", 1, "s390x"),
        ("FROM $NOTHING", 1, "stands for nothing"),
        ("RUN x", 1, "no FROM before"),
        ("FROM base\nENV A=1 B", 2, "not NAME=VALUE"),
        ("FROM base\nRUN cat <<EOF\nx", 2, "has no end"),
        ("FROM base\nSHELL /bin/sh", 2, "JSON array"),
        ("FROM base\nRUN ['a', 1]\nRUN [\"a\", 1]", 3, "only strings"),
        ("", 1, "has none"),
    ],
)
def test_what_is_not_supported_is_refused_at_load_with_its_line(context, dockerfile, line, why):
    with pytest.raises(ImageError) as caught:
        load(context(dockerfile))
    assert str(caught.value).startswith(f"Dockerfile:{line}: ")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM base\n" + "ENV A=a$A$A\n" * 60, "KiB"),
        ("FROM base\n" + 'ENV A="a$A$A"\n' * 60, "too long"),
        ("FROM base\nENV A=" + "a" * 1000 + "\n" + "".join(f"ENV B{i}=$A\n" for i in range(900)), "KiB"),
        ("FROM base\nRUN x " + "\\\n" * 400_000 + "y\nFETCH\n", "Dockerfile:400003"),
        ("FROM base\nENV A=" + "${A:-" * 100_000, "recursion"),
        ("# check=" + " " * 300_000 + "x" + " " * 300_000 + "\nFETCH", "no FROM"),
        ("FROM base\n" * 101, "100 stages"),
        ("FROM base\n" + "RUN x\n" * 1001, "1000 instructions"),
        ("FROM " + "a/" * 60_000 + "!", "not the name"),
        (f"FROM base\nENV A={'a' * 120_000}\nENV " + "".join(f"B{i}=x$A " for i in range(60_000)), "8 MiB"),
        (f"FROM base\nENV A={'a' * 120_000}\nCOPY " + "x$A " * 90_000 + "/", "8 MiB"),
        (
            f"FROM base\nENV A={'a' * 120_000}\nCOPY "
            + " ".join(f"<<B{i}" for i in range(9000))
            + " /\n"
            + "".join(f"$A\nB{i}\n" for i in range(9000)),
            "8 MiB",
        ),
        ("FROM base\nCOPY " + "*a" * 60 + "b /\nCOPY gone /", "there is no 'gone'"),
    ],
)
def test_a_dockerfile_that_would_take_for_ever_is_refused_soon(context, dockerfile, why):
    directory = context(dockerfile, **{"a" * 200: ""}, dot_dockerignore="**/" * 60 + "a*" * 60 + "b\n")
    begun = time.monotonic()
    with pytest.raises(ImageError) as caught:
        load(directory)
    assert why in str(caught.value) and len(str(caught.value)) < 5000
    assert time.monotonic() - begun < 5


def test_stages_that_take_from_each_other_again_and_again_are_hashed_once(home, context):
    more = "".join(f"FROM scratch\nCOPY --from={n} / /a\nCOPY --from={n} / /b\n" for n in range(60))
    directory = context("FROM base\n" + more)
    begun = time.monotonic()
    assert "cancelled" in refused(directory, cancelled=lambda: True)
    assert time.monotonic() - begun < 5


def test_what_has_no_effect_in_a_sandbox_is_told_with_its_line(context):
    directory = context(
        "FROM base\nEXPOSE 80\nCMD x\nHEALTHCHECK NONE\nUSER joe\nCOPY --chown=1:1 Dockerfile /\n"
    )
    notices = load(directory).plan().notices
    assert [notice.split(" ", 2)[:2] for notice in notices] == [
        ["Dockerfile:2:", "EXPOSE"],
        ["Dockerfile:3:", "CMD"],
        ["Dockerfile:4:", "HEALTHCHECK"],
        ["Dockerfile:5:", "USER"],
        ["Dockerfile:6:", "COPY"],
    ]


def test_an_argument_that_nothing_declares_is_refused(context):
    directory = context("FROM base\nARG USED\n")
    load(directory, {"USED": "1", "http_proxy": "http://127.0.0.1:1"})
    with pytest.raises(ImageError, match="no ARG declares the build argument TYPO"):
        load(directory, {"TYPO": "1"})


def test_the_name_changes_with_what_is_asked_for_and_copied_and_nothing_else(context):
    dockerfile = "FROM base\nCOPY src /src\n"
    name = image_name(context(dockerfile, src__a="1", src__b="2"))
    assert name.startswith("dockerfile-") and len(name) == len("dockerfile-") + 20
    directory = context("# said\n" + dockerfile, src__a="1", src__b="2", other="3")
    (directory / "src/a").touch()
    (directory / "src/a").chmod(0o600)
    assert image_name(directory) == name
    (directory / "src/a").chmod(0o700)
    assert image_name(directory) != name
    assert image_name(context(dockerfile, src__a="1", src__b="3")) != name
    assert image_name(context(dockerfile, src__a="1", src__c="2")) != name
    ignoring = context(dockerfile, src__a="1", src__b="2", src__log="x", dot_dockerignore="**/log\n")
    assert image_name(ignoring) == name


def test_the_name_tells_apart_what_a_variable_of_the_base_names(context):
    dockerfile = "FROM base\nCOPY ${OF_THE_BASE}own /own\n"
    name = image_name(context(dockerfile, own="1", xown="1"))
    assert name == image_name(context(dockerfile, own="1", xown="1"))
    assert name != image_name(context(dockerfile, own="1", xown="2"))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_no_header_of_an_archive_takes_all_memory(tmp_path, mode):
    with tarfile.open(tmp_path / "a.tar", mode, format=tarfile.PAX_FORMAT) as archive:
        for name, more in (("good", {}), ("evil", {"comment": "x" * (1 << 20)})):
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = 3 << 20, more
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    found = image_context.find(tmp_path, ["a.tar"], unpack=True)
    assert found.bases == (("a.tar", True),)
    sent = io.BytesIO()
    with pytest.raises(ValueError, match="an archive has a header of more than 256 KiB"):
        image_context.send(found, sent, exact=False)
    assert len(sent.getvalue()) > 3 << 20, "what is before it is read"
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b no archive")
    assert image_context.find(tmp_path, ["a.tar"], unpack=True).bases == (("a.tar", False),)


def test_a_file_is_hashed_once_however_often_it_is_copied(context, monkeypatch):
    directory = context("FROM base\n" + "".join(f"COPY {'./' * n}src /{n}\n" for n in range(20)), src__a="1")
    read = []
    hash_file = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: read.append(file) or hash_file(file, kind))
    image_name(directory)
    assert len(read) == 1


@pytest.mark.parametrize(("text", "why"), [("a\n" * 1001, "1000 patterns"), ("a" * (65 << 10), "64 KiB")])
def test_a_dockerignore_that_would_take_for_ever_is_refused(context, text, why):
    with pytest.raises(ImageError, match=why):
        load(context("FROM base\nCOPY . /\n", dot_dockerignore=text))


def test_what_all_lines_copy_is_bounded_together(context, monkeypatch):
    monkeypatch.setattr(source, "MOST_ENTRIES", 5)
    with pytest.raises(ImageError, match="Dockerfile:3: COPY: with all before it"):
        load(context("FROM base\nCOPY src /a\nCOPY ./src /b\n", src__a="1", src__b="2"))


def test_a_dockerignore_is_read_as_docker_reads_it(context):
    directory = context(
        "FROM base\nCOPY . /all\n",
        dot_dockerignore="# said\n*.md\n!README.md\n/build\n**/cache/*.bin\nkeep/*\n!keep/this\n"
        "**.pyc\n[xy]\\?\n",
        README="",
        build__x="",
        src__build="",
        src__cache__a="",
        keep__this="",
        keep__that="",
    )
    for name in ("README.md", "a.md", "src/cache/b.bin", "src/c.md", "src/d.pyc", "x?", "z?"):
        (directory / name).write_text("")
    (step,) = load(directory).plan().stages[-1].steps
    found = {entry.name for entry in load(directory).found(step).entries if entry.path.is_file()}
    assert found == {
        ".dockerignore",
        "Dockerfile",
        "README",
        "README.md",
        "keep/this",
        "src/build",
        "src/c.md",
        "src/cache/a",
        "z?",
    }


def test_a_link_that_leads_out_of_the_context_is_not_followed(context):
    directory = context("FROM base\nCOPY secret /\n")
    (directory / "secret").symlink_to("/etc/passwd")
    with pytest.raises(ImageError, match=r"Dockerfile:2: .*leads out of"):
        image_name(directory)


@pytest.mark.parametrize(
    "reference",
    ["python:3.11-slim", "ubuntu:latest", "docker.io/library/x", "ghcr.io/a/b@sha256:" + "0" * 64, "a/" * 99],
)
def test_images_of_registries_have_one_name_everywhere(reference):
    assert local_name(reference) == image_names.local_name(reference) or "/" not in reference + ":"
