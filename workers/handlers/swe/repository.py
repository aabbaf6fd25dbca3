"""The repository in an image, made ready: at its base commit, and for the agent without a trace of the fix.

`prepare` gives the same tree in every sandbox of an image, so what the agent changed is the difference of two
of them, and a patch of one applies in another. `hide_future` is for the agent's sandbox alone.
"""

from __future__ import annotations

import shlex

from sandbox.client import SandboxClient
from workers.errors import TaskError
from workers.handlers.swe.rows import Instance
from workers.handlers.swe.specs import Spec
from workers.handlers.swe.testfiles import file_of_smith

PREPARE_S = 600.0
"""Most seconds of one step: to remove history of a large repository takes minutes. INIT has a limit, too."""
BUG_PATCH = "/tmp/rollout-bug.diff"
OFFICIAL_SUBJECT = "SWE-bench"
"""Of the commit that official images have on top of the base commit: their changes for running the tests."""

_SETTINGS = (
    ("safe.directory", "'*'"),  # images may have been made by another user than the sandbox's
    # Inode and ctime are not what the index of an image says, which would have git read every file anew.
    ("core.checkStat", "minimal"),
    ("core.trustctime", "false"),
)
GIT_ENV = f"export GIT_CONFIG_COUNT={len(_SETTINGS)} " + " ".join(
    f"GIT_CONFIG_KEY_{number}={key} GIT_CONFIG_VALUE_{number}={value}"
    for number, (key, value) in enumerate(_SETTINGS)
)

_NO_DIRECTORY, _NO_REPOSITORY, _NO_COMMIT, _NO_CHECKOUT, _NO_BUG, _NOT_HIDDEN = range(81, 87)
_PROBLEMS = {
    _NO_DIRECTORY: "the image has no directory {repo}; give `spec.repo_dir`, or another image",
    _NO_REPOSITORY: "{repo} in the image is no git repository",
    _NO_COMMIT: "base_commit {base} is not in {repo} of the image: is it another instance's image?",
    _NO_CHECKOUT: "base_commit {base} cannot be checked out in {repo}",
    _NO_BUG: "the row's patch, which puts the bug in, does not apply in {repo}",
    _NOT_HIDDEN: "history beyond the base commit cannot be removed from {repo}",
}


async def prepare(sandbox: SandboxClient, instance: Instance, spec: Spec) -> str:
    """Bring the repository to the state that the agent starts from; answers the commit it stands at.

    Changes that an image has made without committing them stay: its tests may need them.

    Raises:
        TaskError: The image does not hold what the row says.
    """
    if instance.bug_patch:
        await sandbox.write_file(BUG_PATCH, instance.bug_patch)
    words = (await _run(sandbox, _prepare_script(instance, spec), instance, spec)).split()
    return words[-1] if words else ""


async def hide_future(sandbox: SandboxClient, instance: Instance, spec: Spec) -> None:
    """Remove what lies beyond the base commit, and tests that the agent must not see.

    These are refs, reflogs and objects of later commits, and remotes; for SWE-smith the whole history,
    because the commit before the bug is the fix.

    Raises:
        TaskError: It cannot be done; the fix could be read.
    """
    await _run(sandbox, _hide_script(instance, spec), instance, spec)


async def _run(sandbox: SandboxClient, script: str, instance: Instance, spec: Spec) -> str:
    # In a shell of its own: it may exit, and what it sets must not stay.
    result = await sandbox.bash(f"(\n{GIT_ENV}\n{script}\n)", timeout=PREPARE_S)
    if result.exit_code != 0:
        problem = _PROBLEMS.get(result.exit_code or 0, "the repository {repo} cannot be made ready")
        took = f" within {PREPARE_S:g} s" if result.timed_out else ""
        where = problem.format(repo=spec.repo_dir, base=instance.base_commit)
        raise TaskError(f"{instance.instance_id}: {where}{took}: {result.output[-1000:].strip()}")
    return result.output


def _prepare_script(instance: Instance, spec: Spec) -> str:
    lines = [
        f"cd {shlex.quote(spec.repo_dir)} || exit {_NO_DIRECTORY}",
        f"git rev-parse -q --verify HEAD >/dev/null || exit {_NO_REPOSITORY}",
    ]
    if instance.base_commit is not None:
        commit = shlex.quote(instance.base_commit + "^{commit}")
        lines += [
            f"base=$(git rev-parse -q --verify {commit}) || exit {_NO_COMMIT}",
            'if [ "$(git rev-parse HEAD)" != "$base" ] && ! {',
            '  [ "$(git rev-parse -q --verify HEAD~1)" = "$base" ] &&',
            f'  [ "$(git log -1 --format=%s)" = {OFFICIAL_SUBJECT} ]; }}',
            # An overlay may be unable to remove directories of the image; empty ones do no harm.
            'then git checkout -q -f --detach "$base" && git clean -fdq 2>/dev/null ||'
            f' [ -z "$(git status --porcelain)" ] || exit {_NO_CHECKOUT}; fi',
        ]
    if instance.fix_commit is not None:
        # R2E-Gym keeps its hidden tests in the image, and some of its images stand at the fix.
        fix = shlex.quote(instance.fix_commit)
        lines += [
            "rm -rf r2e_tests /r2e_tests ~root/r2e_tests 2>/dev/null",
            f'if [ "$(git rev-parse HEAD)" = {fix} ]',
            f"then git checkout -q -f --detach HEAD~1 || exit {_NO_CHECKOUT}; fi",
        ]
    if instance.bug_patch:
        lines.append(f"git apply --whitespace=nowarn {BUG_PATCH} && rm {BUG_PATCH} || exit {_NO_BUG}")
    lines.append("git rev-parse HEAD")
    return "\n".join(lines)


def _hide_script(instance: Instance, spec: Spec) -> str:
    lines = [f"cd {shlex.quote(spec.repo_dir)} || exit {_NO_DIRECTORY}", "exec >/dev/null"]
    if instance.bug_patch:
        hidden = sorted({file for name in instance.fail_to_pass if (file := file_of_smith(name))})
        author = " ".join(
            f"GIT_{who}_{what}=rollout" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        )
        lines += [
            "rm -f -- " + " ".join(map(shlex.quote, hidden)) if hidden else ":",
            f"git add -A && commit=$({author} git commit-tree -m 'Initial commit' $(git write-tree)) &&",
            f"git checkout -q -f --detach $commit || exit {_NOT_HIDDEN}",
        ]
    lines += [
        "git symbolic-ref -q HEAD || git checkout -q -B main",
        "current=$(git symbolic-ref HEAD)",
        "git remote | xargs -r -n1 git remote remove",
        "keep=$(echo $current; git for-each-ref --merged=HEAD --format='%(refname)' refs/tags)",
        "git for-each-ref --format='%(refname)' | grep -vxF \"$keep\" | sed 's/^/delete /' |"
        f" git update-ref --stdin || exit {_NOT_HIDDEN}",
        "dir=$(git rev-parse --absolute-git-dir)",
        'rm -rf "$dir/logs" "$dir/worktrees" "$dir"/*_HEAD',
        "git pack-refs --all",
        # Commits that no ref leads to can still be read by their hash, which a listing of objects tells.
        "all=$(git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c '^commit$')",
        '[ "$all" = "$(git rev-list --count HEAD --tags)" ] ||'
        f" {{ git repack -q -a -d && git prune --expire=now; }} || exit {_NOT_HIDDEN}",
    ]
    return "\n".join(lines)
