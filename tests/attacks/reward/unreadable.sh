echo '# x' >> calc.py; echo secret > secret.txt; chmod 000 secret.txt; mkdir closed; echo x > closed/x; chmod 000 closed
