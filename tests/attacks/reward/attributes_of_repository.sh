echo '*.py working-tree-encoding=UTF-16 filter=gone' | tee .gitattributes > .git/info/attributes
git config filter.gone.clean false; git config filter.gone.required true
git config core.fsmonitor /bin/false; git config core.worktree /nowhere; git config core.autocrlf input
printf '#!/bin/sh\nexit 1\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit
echo '# x' >> calc.py
