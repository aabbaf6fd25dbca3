rm -f /usr/bin/bash
