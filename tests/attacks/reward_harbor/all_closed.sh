cd / && mkdir -p /app/a/b && touch /app/a/b/c && chmod 000 /app/a/b/c /app/a/b /app/a /app /srv /tmp
