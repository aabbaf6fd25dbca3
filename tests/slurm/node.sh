#!/bin/bash
# The first process of a virtual node, inside namespaces of its own (cluster.py starts it): gives the node its host
# name, its /tmp and /dev/shm, then runs slurmd. Bash, because the first process must collect orphans, and does.
#
# NODE name; NODE_TMP directory that becomes /tmp; NODE_HOSTS file that becomes /etc/hosts; NODE_SHARED directories
# below /tmp that all nodes see, one a line; NODE_DROP non-empty: give up the namespace's capabilities.
set -eu

hostname "$NODE"
while IFS= read -r path; do
    [ -n "$path" ] || continue
    mkdir -p "$NODE_TMP/${path#/tmp/}"
    mount --rbind "$path" "$NODE_TMP/${path#/tmp/}"
done <<<"$NODE_SHARED"
mount --rbind "$NODE_TMP" /tmp
mount -t tmpfs -o mode=1777,size=50% shm /dev/shm
mount --bind "$NODE_HOSTS" /etc/hosts

drop=()
[ -z "$NODE_DROP" ] || drop=(setpriv --ambient-caps=-all --inh-caps=-all)
unset NODE NODE_TMP NODE_HOSTS NODE_SHARED NODE_DROP
cd /
"${drop[@]}" "$@" &
# When slurmd ends the node does: its namespace, and with it every process of the node.
wait $!
