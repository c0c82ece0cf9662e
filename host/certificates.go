package host

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/doctor"
	"github.com/kvhost/kvhost/host/internal/regular"
)

// endsSoon is the time before the end of a certificate from which the host warns.
const endsSoon = 14 * 24 * time.Hour

// certificate is the validity of the certificate that a setting names. For a bundle of signers, it is that of the signer with
// the latest end.
type certificate struct {
	setting, file string
	from, until   time.Time
}

// certificates returns the certificates that a configuration names. Each is read again when its file has changed. An unreadable file is
// reported where it is used, not here.
func certificates(c *config.Config) (list []*regular.Renewed[certificate]) {
	add := func(setting, file string, bundle bool) {
		if file != "" {
			one, _ := regular.Renew(func() (certificate, error) { return readCertificate(setting, file, bundle) }, slog.New(slog.DiscardHandler), file)
			list = append(list, one)
		}
	}
	add("http.tls_cert", c.HTTP.TLSCert, false)
	add("peers.cert", c.Peers.Cert, false)
	add("peers.ca", c.Peers.CA, true)
	for i, r := range c.Roots {
		add("root["+strconv.Itoa(i)+"].ca_file", r.CAFile, true)
	}
	return list
}

// readCertificate reads the first certificate of a file. Of a bundle it reads the certificate with the latest end.
func readCertificate(setting, file string, bundle bool) (found certificate, err error) {
	ctx, stop := context.WithTimeout(context.Background(), 5*time.Second)
	defer stop()
	text, err := regular.ReadFile(ctx, file, 1<<20)
	if err != nil {
		return found, err
	}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		x, err := x509.ParseCertificate(block.Bytes)
		if err != nil || block.Type != "CERTIFICATE" || x.NotAfter.Before(found.until) {
			continue
		}
		if found = (certificate{setting, file, x.NotBefore, x.NotAfter}); !bundle {
			break
		}
	}
	return found, nil
}

// judge describes the problem with a certificate at a time, with its level. Both are empty if there is none.
func (c certificate) judge(now time.Time) (level doctor.Level, says string) {
	const renew = "it is read again once it was renewed"
	switch left := c.until.Sub(now); {
	case left < 0:
		return doctor.Problem, fmt.Sprintf("%s has expired on %s, and is refused: %s", c.file, c.until.UTC().Format(time.DateTime), renew)
	case now.Before(c.from):
		return doctor.Problem, fmt.Sprintf("%s is valid from %s, and refused until then: does this machine's clock go right?", c.file,
			c.from.UTC().Format(time.DateTime))
	case left < endsSoon:
		return doctor.Warning, fmt.Sprintf("%s expires on %s, in %.1f days: %s", c.file, c.until.UTC().Format(time.DateTime), left.Hours()/24, renew)
	}
	return "", ""
}

// judgeCertificates warns of certificates that end soon. No certificate keeps a host from starting.
func (h *Host) judgeCertificates(context.Context) error {
	h.certificates = certificates(h.cfg)
	for _, one := range h.certificates {
		c := one.Now()
		switch level, says := c.judge(time.Now()); {
		case c.setting == "" || says == "":
		case h.found != nil:
			h.found.find(level, c.setting, says)
		default:
			h.log.Warn("certificate", "setting", c.setting, "state", says)
		}
	}
	return nil
}

// certificateEnds returns the ends of certificates, by the settings that name them.
func (h *Host) certificateEnds() map[string]time.Time {
	ends := map[string]time.Time{}
	for _, one := range h.certificates {
		if c := one.Now(); c.setting != "" {
			ends[c.setting] = c.until
		}
	}
	return ends
}
