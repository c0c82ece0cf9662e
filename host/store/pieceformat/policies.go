package pieceformat

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
)

// CheckPolicy judges a file of PoliciesDir by its base name and its content. For a place policy it returns the base
// name of the module's file, which must be in the same directory. ErrNotPiece says that the file is neither.
func CheckPolicy(base string, b []byte) (module string, err error) {
	if digest, ok := strings.CutSuffix(base, ModuleSuffix); ok {
		if got := fmt.Sprintf("%x", sha256.Sum256(b)); got != digest {
			return "", fmt.Errorf("%w: the module's digest is %s", ErrDamaged, got)
		}
		return "", nil
	}
	if !strings.HasSuffix(base, PlaceSuffix) {
		return "", ErrNotPiece
	}
	var text struct {
		Module struct {
			SHA256 string `json:"sha256"`
		} `json:"module"`
	}
	if err := json.Unmarshal(b, &text); err != nil {
		return "", fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	sha := text.Module.SHA256
	if sha == "" || filepath.Base(sha) != sha {
		return "", fmt.Errorf("%w: it names no module", ErrDamaged)
	}
	return sha + ModuleSuffix, nil
}
