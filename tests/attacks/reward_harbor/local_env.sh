mkdir -p ~/.local/bin
echo 'grep() { return 0; }' > ~/.local/bin/env
