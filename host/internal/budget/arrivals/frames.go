package arrivals

import "encoding/binary"

// Kinds and flags of HTTP/2 frames.
const (
	kindData, kindHeaders, kindReset, kindGoAway = 0, 1, 3, 7
	flagEndStream, flagPadded                    = 1, 8
)

const (
	preface   = len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") // before a client's first frame
	headBytes = 9
)

// frames follows one direction of an HTTP/2 connection. Its bytes may arrive in parts of any size.
type frames struct {
	skip int // bytes before the first frame
	head [headBytes]byte
	got  int // bytes of head
	left int // bytes of the frame's payload to come
}

// kind, flags and stream are fields of the current frame.
func (f *frames) kind() byte     { return f.head[3] }
func (f *frames) flags() byte    { return f.head[4] }
func (f *frames) stream() uint32 { return binary.BigEndian.Uint32(f.head[5:]) &^ (1 << 31) }
func (f *frames) length() int    { return int(f.head[0])<<16 | int(f.head[1])<<8 | int(f.head[2]) }

// between reports whether the next byte is the first of a frame.
func (f *frames) between() bool { return f.skip == 0 && f.got == 0 }

// visitor receives the frames.
type visitor interface {
	begin() error // called after the head of a frame
	payload(p []byte) error
	end() error
}

// feed takes bytes and calls v for the frames in them.
func (f *frames) feed(p []byte, v visitor) error {
	n := min(f.skip, len(p))
	f.skip, p = f.skip-n, p[n:]
	for len(p) > 0 {
		if f.got < headBytes {
			n := copy(f.head[f.got:], p)
			f.got, p = f.got+n, p[n:]
			if f.got < headBytes {
				return nil
			}
			f.left = f.length()
			if err := v.begin(); err != nil {
				return err
			}
		}
		n := min(f.left, len(p))
		if n > 0 {
			if err := v.payload(p[:n]); err != nil {
				return err
			}
		}
		f.left, p = f.left-n, p[n:]
		if f.left == 0 {
			f.got = 0
			if err := v.end(); err != nil {
				return err
			}
		}
	}
	return nil
}

// goAway returns the frame that ends a connection with a text.
func goAway(text string) []byte {
	const enhanceYourCalm = 11
	b := []byte{0, 0, 0, kindGoAway, 0, 0, 0, 0, 0}
	b = binary.BigEndian.AppendUint32(b, 1<<31-1) // the number of the last stream; it does not matter here
	b = append(binary.BigEndian.AppendUint32(b, enhanceYourCalm), text...)
	b[1], b[2] = byte((len(b)-headBytes)>>8), byte(len(b)-headBytes)
	return b
}
