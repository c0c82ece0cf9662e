package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// Versions of packages sort: those between two releases before the next one.
func TestWheelVersions(t *testing.T) {
	for version, want := range map[string]string{
		"1.2.3":                        "1.2.3",
		"0.1.0~git20261123.2e4370f":    "0.1.0.dev20261123+2e4370f",
		"0.0.0~2e4370f":                "0.0.0.dev0+2e4370f",
		"0.1.0~git20261123.2e4.dirty":  "0.1.0.dev20261123+2e4.dirty",
		packageVersion("0.1.0~git2.a"): "0.1.0.dev2+a",
	} {
		if got := wheelVersion(version); got != want {
			t.Errorf("wheel's version of %s: got %s, want %s", version, got, want)
		}
	}
}

// A wheel gives an environment the program, the client and the engines' plugins; and a client of it starts a host.
func TestWheel(t *testing.T) {
	dir := releaseDir(t)
	testenv.Need(t, testenv.PythonPackages)
	env, run := t.TempDir(), t.TempDir()
	must(t, "python3", "-m", "venv", env)
	python := filepath.Join(env, "bin", "python")
	wheel := filepath.Join(dir, "kvhost-"+distVersion+"-py3-none-manylinux_2_17_x86_64.whl")
	must(t, python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
	if got := must(t, filepath.Join(env, "bin", "kvhost"), "version"); !strings.HasPrefix(got, "kvhost "+distVersion) {
		t.Errorf("installed program: got version %q, want %s", got, distVersion)
	}

	packages, err := filepath.Glob(filepath.Join(testenv.Root(), ".venv/lib/python3*/site-packages"))
	if err != nil || len(packages) != 1 {
		t.Fatalf("packages of the client's tests: got %v, %v, want one directory", packages, err)
	}
	site := strings.TrimSpace(must(t, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
	testenv.OK(t, os.WriteFile(filepath.Join(site, "needs.pth"), []byte(packages[0]+"\n"), 0o644))
	cmd := exec.Command(python, "-c", fmt.Sprintf(`
import kvhost, logging, os, pathlib, signal
from importlib import metadata
from kvhost.own import OwnHost, program
assert kvhost.__file__.startswith(%[1]q) and program().startswith(%[1]q), (kvhost.__file__, program())
assert kvhost.__version__ == %[2]q, kvhost.__version__
plugins = {e.value for e in metadata.distribution("kvhost").entry_points}
assert plugins == {"kvhost.vllm:register", "kvhost.sglang.plugin:register"}, plugins
logging.basicConfig()
host = OwnHost(memory="64MiB")
host.ensure()
group = kvhost.Group.uniform(0, blocks=1, layers=1, parts=1, page_bytes=65536)
space = kvhost.Namespace(model="m", dtype="bf16", key_bytes=32, tokens_per_block=16, groups=[group])
with kvhost.Session(host.socket, "e", space) as s:
    print("served by", s.version)
said = pathlib.Path(host.socket).with_suffix(".log").read_text()
os.kill(int(said.split('"pid":')[1].split(",")[0]), signal.SIGTERM)
`, env, distVersion))
	cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+run, "KVHOST_BIN=")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "served by "+distVersion+"\n") {
		t.Errorf("a client of the wheel's host: %v, want one that is served by %s\n%s", err, distVersion, out)
	}
}
