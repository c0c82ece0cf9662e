package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
)

// The log for programs has durations and enumerations as the words that the log for people has.
func TestJSONLogHasWords(t *testing.T) {
	name := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(name)
	testenv.OK(t, err)
	defer f.Close()
	stderr := os.Stderr
	os.Stderr = f
	log, _ := newLog(&config.Log{Level: config.LevelInfo, Format: config.FormatJSON})
	os.Stderr = stderr
	log.Warn("a line", "after", 1480*time.Millisecond, "by", evictor.Loaded, "bytes", 7, "error", os.ErrNotExist)
	text, err := os.ReadFile(name)
	testenv.OK(t, err)
	got := map[string]any{}
	testenv.OK(t, json.Unmarshal(text, &got))
	for key, want := range map[string]any{
		"level": "WARN", "after": "1.48s", "by": evictor.Loaded.String(), "bytes": 7., "error": "file does not exist",
	} {
		if got[key] != want {
			t.Errorf("%s is %v, want %v", key, got[key], want)
		}
	}
	if _, err := time.Parse(time.RFC3339Nano, got["time"].(string)); err != nil {
		t.Error(err)
	}
}
