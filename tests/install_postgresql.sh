#!/usr/bin/env bash
# Brings Debian's PostgreSQL server to a machine whose tests need one and lack it; the tests start
# a throw-away cluster of their own.  Does nothing where a server is found, and says so where it
# may not install one: then those tests are skipped, or fail if FACTORY_REQUIRE_POSTGRESQL is set.
set -euo pipefail

found() {
    command -v postgres >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null
}

if found; then
    exit 0
fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "no PostgreSQL server here, and none can be installed without root and apt-get:" \
        "its tests will not run" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends postgresql >/dev/null
found
