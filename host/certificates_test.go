package host_test

import (
	"crypto/x509"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/doctor"
	"github.com/kvhost/kvhost/host/internal/testkit/certificates"
)

// A certificate that is not valid, or not for long, is found by check. A start takes it: the file may be renewed at any time.
func TestCertificatesThatEnd(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		from, until time.Time
		level       doctor.Level
		says        string
	}{
		{now.Add(-48 * time.Hour), now.Add(-time.Hour), doctor.Problem, "has expired on "},
		{now.Add(time.Hour), now.Add(400 * 24 * time.Hour), doctor.Problem, "is valid from "},
		{now.Add(-time.Hour), now.Add(24 * time.Hour), doctor.Warning, "expires on "},
		{now.Add(-time.Hour), now.Add(400 * 24 * time.Hour), "", ""},
	} {
		cfg := configuration(t)
		dir := filepath.Dir(cfg.Socket)
		cfg.HTTP.Listen, cfg.HTTP.TLSCert, cfg.HTTP.TLSKey = "127.0.0.1:0", filepath.Join(dir, "cert"), filepath.Join(dir, "key")
		certificates.New(t).Pair(t, cfg.HTTP.TLSCert, cfg.HTTP.TLSKey, "127.0.0.1", x509.Certificate{NotBefore: c.from, NotAfter: c.until})
		found := host.Check(t.Context(), host.Config{Config: cfg})
		i := slices.IndexFunc(found.Findings, func(f doctor.Finding) bool { return f.About == "http.tls_cert" })
		switch {
		case found.Refused != nil:
			t.Errorf("valid from %s to %s: check says that a host would not start: %v", c.from, c.until, found.Refused)
		case i < 0 && c.says != "" || i >= 0 && (found.Findings[i].Level != c.level || !strings.Contains(found.Findings[i].Says, c.says)):
			t.Errorf("valid from %s to %s: check finds %+v, want a %s that says %q", c.from, c.until, found.Findings, c.level, c.says)
		}
	}
}
