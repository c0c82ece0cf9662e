package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
)

// The log for programs has durations and enumerations as the words that the log for people has.
func TestJSONLogHasWords(t *testing.T) {
	name := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	stderr := os.Stderr
	os.Stderr = f
	log, _ := newLog(&config.Log{Level: config.LevelInfo, Format: config.FormatJSON})
	os.Stderr = stderr
	log.Warn("a line", "after", 1480*time.Millisecond, "by", evictor.Loaded, "bytes", 7, "error", os.ErrNotExist)
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]any{}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
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
