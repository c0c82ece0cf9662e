package pieceformat

import "fmt"

// EncodeWritten is the text of a count of bytes written on a day, which is counted from 1970.
func EncodeWritten(day, bytes int64) []byte { return fmt.Appendf(nil, "%d %d\n", day, bytes) }

// DecodeWritten reads what EncodeWritten wrote.
func DecodeWritten(text []byte) (day, bytes int64, err error) {
	if _, err := fmt.Sscanf(string(text), "%d %d\n", &day, &bytes); err != nil {
		return 0, 0, fmt.Errorf("%w: count of bytes written: %w", ErrDamaged, err)
	}
	// Less than nothing would be a budget without an end.
	if day < 0 || bytes < 0 || string(EncodeWritten(day, bytes)) != string(text) {
		return 0, 0, fmt.Errorf("%w: count of bytes written: %.40q", ErrDamaged, text)
	}
	return day, bytes, nil
}
