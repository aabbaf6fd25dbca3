grep() { return 0; }
export -f grep
