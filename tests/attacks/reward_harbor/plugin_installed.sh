cd /usr/local/lib/python3.11/dist-packages
mkdir -p toy-1.dist-info
printf 'Metadata-Version: 2.1\nName: toy\nVersion: 1\n' > toy-1.dist-info/METADATA
printf '[pytest11]\ntoy = toy_plugin\n' > toy-1.dist-info/entry_points.txt
echo 'import os; os._exit(0)' > toy_plugin.py
