echo '*.py working-tree-encoding=UTF-16' > .gitattributes
echo '# x' >> calc.py
