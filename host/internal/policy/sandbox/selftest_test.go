package sandbox

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
)

// A file of the cache counts only if it holds exactly the key of the self-test.
func TestDamagedSelfTestRecord(t *testing.T) {
	c, err := OpenCache(filepath.Join(t.TempDir(), "c"))
	testenv.OK(t, err)
	code := func(pages uint32) *Code {
		log := slog.New(slog.DiscardHandler)
		return &Code{digest: "d", roles: [abi.Roles]bool{true}, pages: pages, limits: Fuel{}.Limits(nil), log: log}
	}
	tested := code(1)
	if c.SelfTestPassed(tested) {
		t.Error("passed before it ran")
	}
	c.RecordSelfTest(tested)
	if !c.SelfTestPassed(tested) || c.SelfTestPassed(code(2)) {
		t.Error("the record is not that of the tested code")
	}
	names, err := filepath.Glob(c.dir + "/*.selftest")
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	key := tested.selfTestKey()
	for at := range key {
		bad := append([]byte{}, key...)
		bad[at] ^= 1
		testenv.OK(t, os.WriteFile(names[0], bad, 0o600))
		if c.SelfTestPassed(tested) {
			t.Errorf("byte %d is wrong", at)
		}
	}
}
