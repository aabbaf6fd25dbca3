rm -rf .git; mkdir -p .git/hooks
echo '# x' >> calc.py
