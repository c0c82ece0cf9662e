package gds

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// The variable that names cuFile's configuration, and its default.
const (
	cuFileConfigEnv = "CUFILE_ENV_PATH_JSON"
	cuFileConfig    = "/etc/cufile.json"
)

// Configure sets the directory of cuFile's log, and allows cuFile to copy through host memory if it has no better way;
// the caller measures whether that pays. All other settings stay as in the system's cufile.json, which describes its
// file systems. A library without functions for parameters gets a changed copy of that file. Call it before
// [CuFile.Open].
func (c *CuFile) Configure(logDir string) error {
	if c.fn.setString.addr != 0 && c.fn.setBool.addr != 0 {
		return errors.Join(c.SetText(LogDir, logDir), c.SetBool(AllowCompatMode, true))
	}
	from := os.Getenv(cuFileConfigEnv)
	if from == "" {
		from = cuFileConfig
	}
	base, err := os.ReadFile(from)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("gds: cuFile's configuration: %w", err)
	}
	text, err := privateConfig(base, logDir)
	if err != nil {
		return fmt.Errorf("gds: %s: %w", from, err)
	}
	name := filepath.Join(logDir, "cufile.json")
	if err := os.WriteFile(name, text, 0o600); err != nil {
		return fmt.Errorf("gds: cuFile's configuration: %w", err)
	}
	return setenv(cuFileConfigEnv, name)
}

// privateConfig returns a cufile.json with the log's directory and the compatibility mode set.
func privateConfig(base []byte, logDir string) ([]byte, error) {
	tree := map[string]any{}
	if text := withoutComments(base); len(text) > 0 {
		if err := json.Unmarshal(text, &tree); err != nil {
			return nil, err
		}
	}
	section := func(name string) map[string]any {
		s, ok := tree[name].(map[string]any)
		if !ok {
			s = map[string]any{}
			tree[name] = s
		}
		return s
	}
	section("logging")["dir"] = logDir
	section("properties")["allow_compat_mode"] = true
	return json.MarshalIndent(tree, "", "  ")
}

// withoutComments removes the comments that cuFile allows in its JSON: from // to the end of the line, outside
// strings.
func withoutComments(text []byte) []byte {
	var out []byte
	quoted := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\' && i+1 < len(text):
			out = append(out, c, text[i+1])
			i++
			continue
		case c == '"':
			quoted = !quoted
		case !quoted && c == '/' && i+1 < len(text) && text[i+1] == '/':
			for i < len(text) && text[i] != '\n' {
				i++
			}
			out = append(out, '\n')
			continue
		}
		out = append(out, text[i])
	}
	return out
}
