r"""What makes bash tell where a command begins and ends: its rc file, and the line typed for a command.

Written so that what a command did to the shell does not matter: `builtin` because of functions and `\`
because of aliases of the same name, markers to /dev/tty because the shell's output may have been redirected
for good (`exec >file`), no assignment that a read-only variable could make fail before the marker is out.

`set +euv`: one command's strictness must not end the shell at the next. PROMPT_COMMAND is the way back after
^C, which skips the rest of the typed line; it is there while a command runs, and __sbx_number keeps it from
printing a second marker should it stay. Input that the command was sent and did not read is dropped, else
bash would run it as a command of its own. `2>/dev/null` hides all this from `set -x`. DEBUG and RETURN traps
last for one command: they would act on all of this, and bash does not let a sourced file remove them.
"""

_RC = r"""
set +H +o history
unset HISTFILE PROMPT_COMMAND
PS1= PS2= PS4='+ '
__sbx_number= __sbx_code=0 __sbx_rest=
__sbx_begin() {
    __sbx_number="$1"
    builtin printf -v PROMPT_COMMAND %s "$__sbx_back"
    [[ -z $2 ]] || __sbx_say b "$1" >/dev/tty || __sbx_say b "$1"
    builtin return "$__sbx_code"
}
__sbx_say() { builtin printf '\036@NONCE@;%s;%s;@NONCE@\036' "$1" "$2"; }
__sbx_prompt() { [[ -z $__sbx_number ]] || __sbx_mark "$1" "$__sbx_number"; }
__sbx_mark() {
    __sbx_code="$1" __sbx_number=
    builtin set +euv
    {
        while builtin read -t 0; do builtin read -r -t 1 -n 4096 __sbx_rest; done
        builtin printf '\036@NONCE@;e;%s;%s;%s;@NONCE@\036' "$2" "$1" "$PWD"
    } <>/dev/tty >&0 || __sbx_say e "$2;$1;$PWD"
    builtin unset -v PROMPT_COMMAND
    [[ -z $PS1$PS2 ]] || { builtin printf -v PS1 ''; builtin printf -v PS2 ''; }
}
readonly -f __sbx_begin __sbx_say __sbx_prompt __sbx_mark
__sbx_back='{ __sbx_prompt "$?"; builtin trap - DEBUG RETURN; } 2>/dev/null'
readonly __sbx_back
PROMPT_COMMAND=$__sbx_back
"""


def rc_file(nonce):
    """Text of the rc file of a bash whose markers carry `nonce`."""
    return _RC.replace("@NONCE@", nonce)


def framed(number, line, at_prompt, ours):
    """What is typed to run `line` as command `number`. `&& :` keeps the ERR trap out of it; `||` is for a
    shell that cannot redirect any more (restricted, no descriptors left). `at_prompt`: bash has said all that
    belongs to the command before, so no marker need tell where this one's output begins. `ours`: the agent
    is not to see it, and `$?` stays its last command's.
    """
    begin = r"{ \__sbx_begin %d %s&& :; } 2>/dev/null" % (number, "" if at_prompt else "b ")
    code = "$__sbx_code" if ours else "$?"
    return r'%s; %s; %s || \__sbx_mark "%s" %d' % (begin, line, end(number, code), code, number)


def end(number, code="$?"):
    """Typed alone it has a shell at its prompt print the marker once more."""
    return r'{ \__sbx_mark "%s" %d; \builtin trap - DEBUG RETURN; } 2>/dev/null' % (code, number)
