package client_test

import (
	"errors"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

var wireType = regexp.MustCompile(`\b(proto|abi)\.`)

// The client's API has no type of the protocol or of the policy ABI, and an importer builds neither the ABI nor a WebAssembly runtime.
func TestFace(t *testing.T) {
	doc, err := exec.Command("go", "doc", "-all", ".").Output()
	if err != nil {
		t.Fatalf("go doc: %v\n%s", err, said(err))
	}
	for line := range strings.Lines(string(doc)) {
		if wireType.MatchString(line) {
			t.Errorf("the API has a type of the wire or of the ABI: %s", strings.TrimSpace(line))
		}
	}
	deps, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, said(err))
	}
	for path := range strings.FieldsSeq(string(deps)) {
		if strings.HasSuffix(path, "kvhost/abi") || strings.Contains(path, "wazero") {
			t.Errorf("the client needs %s", path)
		}
	}
}

// said is what a command that failed wrote to its standard error.
func said(err error) []byte {
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		return failed.Stderr
	}
	return nil
}
