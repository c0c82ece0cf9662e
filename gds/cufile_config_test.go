package gds

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

func TestPrivateConfigKeepsTheMachines(t *testing.T) {
	base := []byte(`{
    // NOTE : logging
    "logging": { "level": "ERROR" /* not a comment of cuFile's, so an error */ },
}`)
	if _, err := privateConfig(base, "/log"); err == nil {
		t.Error("what is not JSON is accepted")
	}
	base = []byte(`{
    // a comment with "quotes"
    "logging": { "level": "ERROR" }, // "dir": "/tmp"
    "properties": { "allow_compat_mode": false, "rdma_dev_addr_list": [ "10.0.0.1" ] },
    "fs": { "lustre": { "mount_table": { "http://a\"//b": 1 } } }
}`)
	text, err := privateConfig(base, "/log")
	testenv.OK(t, err)
	var got struct {
		Logging    struct{ Level, Dir string }
		Properties struct {
			Compat bool     `json:"allow_compat_mode"`
			Addrs  []string `json:"rdma_dev_addr_list"`
		}
		FS struct {
			Lustre struct {
				Mounts map[string]int `json:"mount_table"`
			}
		}
	}
	testenv.OK(t, json.Unmarshal(text, &got))
	if got.Logging.Level != "ERROR" || got.Logging.Dir != "/log" || !got.Properties.Compat ||
		len(got.Properties.Addrs) != 1 ||
		got.FS.Lustre.Mounts[`http://a"//b`] != 1 {
		t.Errorf("private configuration: got %s", text)
	}
	if text, err = privateConfig(nil, "/log"); err != nil || !json.Valid(text) {
		t.Errorf("configuration of nothing: got %s, %v, want JSON", text, err)
	}
}

func TestConfigureWithAndWithoutParameters(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	c, err := LoadCuFile(g.driver.lib.name)
	testenv.OK(t, err)
	dir := t.TempDir()
	if err := c.Configure(dir); err != nil || double.Calls("cuFileSetParameterString") != 1 ||
		double.Calls("cuFileSetParameterBool") != 1 {
		t.Errorf("configure: %v, want one call of each setter", err)
	}
	c.fn.setString, c.fn.setBool = function{}, function{} // as an old library
	base := filepath.Join(dir, "base.json")
	testenv.OK(t, os.WriteFile(base, []byte(`{"fs": {"generic": {}}}`), 0o600))
	t.Setenv(cuFileConfigEnv, base)
	testenv.OK(t, c.Configure(dir))
	text, err := os.ReadFile(os.Getenv(cuFileConfigEnv))
	var tree map[string]map[string]any
	if err != nil || json.Unmarshal(text, &tree) != nil || tree["logging"]["dir"] != dir ||
		tree["fs"]["generic"] == nil {
		t.Errorf("written configuration: got %s, %v, want the log directory and fs.generic", text, err)
	}
	if err := c.Configure(filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that does not exist is no error")
	}
}
