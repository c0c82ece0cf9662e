package kernels

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"regexp"
	"strings"
	"testing"
)

func TestPTXIsCurrent(t *testing.T) {
	source, err := os.ReadFile("pages.cu")
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(source)
	m := regexp.MustCompile(`(?m)^// source-sha256: ([0-9a-f]{64})$`).FindStringSubmatch(Pages)
	if m == nil {
		t.Fatal("pages.ptx does not say which source it is of")
	}
	if want := hex.EncodeToString(sum[:]); m[1] != want {
		t.Errorf("pages.ptx is of a source with digest %s, pages.cu has %s: run generate.sh where nvcc is", m[1], want)
	}
	for _, want := range []string{".version 7.0\n", ".target sm_80\n", ".entry " + Entry + "(", ".maxntid 512"} {
		if !strings.Contains(Pages, want) {
			t.Errorf("pages.ptx lacks %q", want)
		}
	}
	if strings.Contains(Pages, "\x00") {
		t.Error("pages.ptx holds a zero byte")
	}
}
