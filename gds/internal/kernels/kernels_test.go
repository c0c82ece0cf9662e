package kernels

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

func TestPTXIsCurrent(t *testing.T) {
	for _, k := range []struct {
		ptx, entry string
		threads    int
		sources    []string
	}{
		{Pages, PagesEntry, PagesThreads, []string{"pages.cu"}},
		{Sums, SumsEntry, SumsThreads, []string{"sums.cu", "xxh3.h"}},
		{Codec, EncodeEntry, EncodeThreads, []string{"codec.cu", "huffman.h"}},
		{Codec, PackEntry, PackThreads, []string{"codec.cu", "huffman.h"}},
		{Codec, DecodeEntry, DecodeThreads, []string{"codec.cu", "huffman.h"}},
		{Codec, JoinEntry, JoinThreads, []string{"codec.cu", "huffman.h"}},
	} {
		sum := sha256.New()
		for _, name := range k.sources {
			source, err := os.ReadFile(name)
			testenv.OK(t, err)
			sum.Write(source)
		}
		m := regexp.MustCompile(`(?m)^// source-sha256: ([0-9a-f]{64})$`).FindStringSubmatch(k.ptx)
		if m == nil {
			t.Fatalf("the PTX of %s does not say which source it is of", k.entry)
		}
		if want := hex.EncodeToString(sum.Sum(nil)); m[1] != want {
			t.Errorf("the PTX of %s is of sources with digest %s, %v have %s: run generate.sh where nvcc is", k.entry,
				m[1], k.sources, want)
		}
		for _, want := range []string{".version 7.0\n", ".target sm_80\n", ".entry " + k.entry + "(",
			fmt.Sprintf(".maxntid %d", k.threads)} {
			if !strings.Contains(k.ptx, want) {
				t.Errorf("the PTX of %s lacks %q", k.entry, want)
			}
		}
		if strings.Contains(k.ptx, "\x00") {
			t.Errorf("the PTX of %s holds a zero byte", k.entry)
		}
	}
}
