fix=$(git log --all --reflog --format=%H --grep 'Fix twice' | head -1)
[ -n "$fix" ] || for one in $(git cat-file --batch-all-objects --batch-check | grep commit | cut -d' ' -f1); do
    git show -s "$one" | grep -q 'Fix twice' && fix=$one
done
[ -n "$fix" ] && git show "$fix:calc.py" > calc.py
echo >> README.rst
