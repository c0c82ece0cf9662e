package command

import (
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// A signed policy goes to a registry, comes back by its digest, and a host starts from the local store when the registry is gone.
// Altered bytes, another signature, and references that are not pinned are refused.
func TestPolicyFromRegistry(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	remote := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer remote.Close()
	tagged := "oci://" + strings.TrimPrefix(remote.URL, "http://") + "/policies/mine:1"
	dir, _ := lruFile(t)
	key := strings.Split(want(t, dir, exitOK, "", "policy", "keygen", "vendor"), `"`)[1]
	other := strings.Split(want(t, dir, exitOK, "", "policy", "keygen", "other"), `"`)[1]
	want(t, dir, exitOK, "", "policy", "sign", "--key", "vendor.key", "mine.wasm")

	write(t, dir, "text.wasm", "no module")
	want(t, dir, exitPolicy, "", "policy", "push", "text.wasm", tagged)
	want(t, dir, exitUsage, "", "policy", "push", "mine.wasm")
	line := want(t, dir, exitOK, ", signed", "policy", "push", "mine.wasm", tagged)
	pinned := strings.Split(line, `"`)[1]
	if !strings.HasPrefix(pinned, strings.TrimSuffix(tagged, ":1")+"@sha256:") {
		t.Fatalf("pushed as %s", line)
	}
	config := func(module, key string) string {
		return write(t, dir, "k.toml", fmt.Sprintf(`socket = "k.sock"
policy_store = "store"
[log]
format = "json"
[http]
listen = ""
[gds]
cuda = "off"
[[root]]
path = "root"
capacity = "16MiB"
[[policy]]
module = %q
public_key = %q
`, module, key))
	}
	refused := func(what, module, key string, code int, says string) {
		t.Helper()
		if r := finish(t, command(t, dir, "--config", config(module, key))); r.code != code || !strings.Contains(r.stderr, says) {
			t.Errorf("%s: exit %d, want %d and %q:\n%s", what, r.code, code, says, r.stderr)
		}
	}
	refused("a tag", tagged, key, exitUsage, "policy[0].module")
	refused("before it is pulled", pinned, key, exitPolicy, "kvhost policy pull "+pinned)
	want(t, dir, exitPolicy, "", "policy", "pull", "--store", "store", "--public-key", other, tagged)
	refused("after a pull that was refused", pinned, key, exitPolicy, "kvhost policy pull "+pinned)
	if got := want(t, dir, exitOK, "", "policy", "pull", "--store", "store", tagged); got != line {
		t.Errorf("pulled by tag: %s, pushed: %s", got, line)
	}
	if got := want(t, dir, exitOK, "", "policy", "pull", "--store", "store", "--public-key", key, pinned); got != line {
		t.Errorf("pulled by digest: %s, pushed: %s", got, line)
	}

	remote.Close() // offline from here
	refused("another key", pinned, other, exitPolicy, "signature")
	_, _, stop := startHost(t, dir, "--config", config(pinned, key))
	st, err := ask(t.Context(), &running{socket: filepath.Join(dir, "k.sock")}, hostStatus, &proto.StatusRequest{})
	if err != nil || len(st.Policies) == 0 || st.Policies[0].Name != "mine" || st.Policies[0].Module != "lru" {
		t.Errorf("policies %v: %v", st.GetPolicies(), err)
	}
	want(t, dir, exitPolicy, "kvhost policy pull", "policy", "swap", "--socket", "k.sock", "mine", pinned[:len(pinned)-64]+strings.Repeat("0", 64))
	want(t, dir, exitOK, "mine is lru", "policy", "swap", "--socket", "k.sock", "mine", pinned)
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("the host ended with %d", code)
	}
	files, err := filepath.Glob(filepath.Join(dir, "store", "*", "module.wasm*"))
	if err != nil || len(files) != 2 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		altered := append(append([]byte{}, b[:len(b)-1]...), b[len(b)-1]^1)
		if err := os.WriteFile(file, altered, 0o600); err != nil {
			t.Fatal(err)
		}
		refused(filepath.Base(file)+" altered", pinned, key, exitPolicy, "altered")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want(t, dir, exitFailure, "", "policy", "pull", "--store", "store", pinned) // the registry is gone
}
