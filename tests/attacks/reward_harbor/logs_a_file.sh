rm -rf /logs && echo > /logs
