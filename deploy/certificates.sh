#!/usr/bin/env bash
# Makes what docker-compose.tls.yml mounts: an authority, a certificate for each service, tokens and a key for clients.
#   deploy/certificates.sh [FOLDER [HOST ...]]     FOLDER: deploy/tls; HOSTS: names and addresses of Envoy for clients
# Run again it renews the certificates (they last 90 days) and leaves authority, tokens and keys as they are; services
# read the new ones while they run. FOLDER/authority/key.pem signs for everybody: keep it elsewhere between runs.
set -euo pipefail
umask 077
folder=${1:-$(dirname "$0")/tls}
shift || true
days=${DAYS:-90}
owner=10001 # the containers' user

fail() { echo "certificates.sh: $*" >&2; exit 2; }

[[ $days =~ ^[1-9][0-9]{0,4}$ ]] || fail "DAYS is '$days'; it must be a number of days from 1 to 99999"
mkdir -p "$folder/authority" || fail "cannot make $folder/authority"

# A file for the containers' user: its own where root makes it, readable by all (in a folder that is not) else.
hand_over() {
    if [ "$(id -u)" = 0 ]; then
        chown "$owner:$owner" "$@" && chmod u=rX,go= "$@"
    else
        chmod a+rX "$@"
    fi
}

# openssl does not always say that a disk is full.
filled() {
    local file
    for file in "$@"; do [ -s "$file" ] || fail "cannot write $file"; done
}

authority() {
    local to=$folder/authority
    [ -s "$to/key.pem" ] && [ -s "$to/ca.pem" ] && return
    [ ! -s "$to/ca.pem" ] || fail "$to/ca.pem has no key.pem beside it to sign with"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 -days 3650 -subj "/CN=Outrider services" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout "$to/key.pem.new" -out "$to/ca.pem.new" 2>/dev/null || fail "cannot make the authority"
    filled "$to/key.pem.new" "$to/ca.pem.new"
    mv "$to/key.pem.new" "$to/key.pem" # first: without ca.pem both are made anew
    mv "$to/ca.pem.new" "$to/ca.pem"
}

# issue NAME HOST...: a key and a certificate, put in place of the old ones in one go each.
issue() {
    local name=$1 to=$folder/$1 names=() host
    shift
    for host in "$@"; do
        case $host in
            *[!0-9.:a-fA-F]* | *[a-zA-Z]*) [[ $host == *:* ]] && names+=("IP:$host") || names+=("DNS:$host") ;;
            *) names+=("IP:$host") ;;
        esac
    done
    mkdir -p "$to"
    local extensions="subjectAltName=$(IFS=,; echo "${names[*]}")
extendedKeyUsage=serverAuth,clientAuth
keyUsage=critical,digitalSignature
basicConstraints=critical,CA:FALSE"
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 -subj "/CN=$name" \
        -keyout "$to/key.pem.new" -out "$to/request.pem" 2>/dev/null || fail "cannot make a key for $name"
    openssl x509 -req -sha256 -days "$days" -in "$to/request.pem" -extfile <(echo "$extensions") \
        -CA "$folder/authority/ca.pem" -CAkey "$folder/authority/key.pem" -set_serial "0x$(openssl rand -hex 16)" \
        -out "$to/cert.pem.new" 2>/dev/null || fail "cannot sign for $name"
    cp "$folder/authority/ca.pem" "$to/ca.pem.new"
    rm "$to/request.pem"
    filled "$to"/*.new
    hand_over "$to" "$to"/*.new
    for file in key cert ca; do mv "$to/$file.pem.new" "$to/$file.pem"; done
}

# secret FILE PREFIX: a random word, once.
secret() {
    local file=$folder/$1
    [ -s "$file" ] && return
    echo "$2$(openssl rand -hex 32)" >"$file.new" || fail "cannot write $file"
    hand_over "$file.new"
    mv "$file.new" "$file"
}

authority
issue verify verify-service verify localhost 127.0.0.1
issue draft draft-service draft localhost 127.0.0.1
issue gateway gateway-service gateway localhost 127.0.0.1
issue envoy envoy-service envoy
issue front localhost 127.0.0.1 "$@"
secret tokens ""
secret admin-tokens ""
secret api-keys "sk-"
echo "$folder: certificates for $days days; clients trust $folder/authority/ca.pem and send the key in $folder/api-keys"
