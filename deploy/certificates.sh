#!/usr/bin/env bash
# An authority of your own, and a certificate for the NATS servers: ca.pem, ca-key.pem, server.pem, server-key.pem.
#
#   deploy/certificates.sh DIR NAME...      each NAME is a host name or an IP address of a server
#
# Needs openssl 3. Keep ca-key.pem away from the servers. What is there already is not made again.
set -euo pipefail
umask 077
[ $# -ge 2 ] || { sed -n '2,6p' "$0" >&2; exit 2; }
dir=$1
shift
mkdir -p "$dir"
key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
if [ ! -e "$dir/ca.pem" ]; then
  openssl req -x509 "${key[@]}" -days 3650 -subj "/CN=tensorbus NATS authority" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "$dir/ca-key.pem" -out "$dir/ca.pem" 2>/dev/null
fi
names=""
for name in "$@" localhost 127.0.0.1; do
  if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then kind=IP; else kind=DNS; fi
  names+="${names:+,}$kind:$name"
done
if [ ! -e "$dir/server.pem" ]; then
  openssl req -x509 "${key[@]}" -days 825 -subj "/CN=$1" -CA "$dir/ca.pem" -CAkey "$dir/ca-key.pem" \
    -addext "subjectAltName=$names" -addext "basicConstraints=critical,CA:FALSE" \
    -addext "extendedKeyUsage=serverAuth,clientAuth" -keyout "$dir/server-key.pem" -out "$dir/server.pem" 2>/dev/null
fi
chmod 644 "$dir/ca.pem" "$dir/server.pem"
echo "$dir: ca.pem, server.pem and server-key.pem for $names"
