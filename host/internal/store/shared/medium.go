package shared

import (
	"math"
	"time"
)

// medium is where the members of a root communicate: a directory, whose renames fence, or a bucket, whose conditional writes
// do. Its methods are called by Step, except temp and store.
type medium interface {
	// join announces this host's new incarnation, and ends its earlier ones.
	join() error
	// look reads the evictor's record into Member.view, and then the members into Member.peers. It reads the statuses if this
	// host may need them as the evictor. It returns ErrFenced if this host is seen to be no member any more.
	look(now time.Duration) error
	// follow passes on the records that other members have logged since the last call. If each is nil it skips them. It returns
	// all as false if a log was missed.
	follow(each func(r *Record)) (all bool, err error)
	batch(n uint64) (forget string, victims []Victim, err error)
	decision(n uint64) (decision, error)
	// append writes to this member's log. A failed call is repeated with the same attempt before any other, since other hosts
	// may have read it. It returns ErrFenced if this host is no member any more.
	append(a *attempt, now time.Duration) error
	// tidy removes what append has made superfluous.
	tidy(now time.Duration) error
	// tell writes a status if that is due. It returns ErrFenced if this host is no member any more.
	tell(s *status, at time.Duration) (written bool, err error)
	// temp returns the path of a temporary, which name would have next to its target.
	temp(name string, credit Credit) string
	// store publishes a temporary under its target name. made reports whether it has that name, even if the medium returned an
	// error. The error is ErrDoubt if this is unknown.
	store(d *doubt) (made bool, err error)
	// happened looks again for a publication in doubt. It returns over if the publication has failed and can no longer happen.
	happened(d *doubt) (made, over bool, err error)
	// leave ends the membership. logged reports that everything this member has published is in its log.
	leave(logged bool) error

	// campaign makes this host the evictor if there is no live one. It calls Member.begin.
	campaign(now time.Duration) error

	// The methods below are called on the evictor only.

	// start begins a step. No other work is done unless it succeeds.
	start(now time.Duration) error
	// grant writes the credit granted to a member, if it has changed. The first grant admits the member.
	grant(name string, a *account) error
	// seen reports whether the member has seen its last grant.
	seen(name string, a *account) bool
	// expel ends a membership, and sets account.gone. Once the log of the member cannot grow any more, and no host takes it for a
	// member, account.sealed is set, by expel or later.
	expel(name string, a *account, now time.Duration) error
	// sweep finds what a sealed member has published and not logged. It sets account.swept once all of that is counted, by this
	// call or later.
	sweep(name string, a *account, now time.Duration) error
	// forget removes the rest of a member.
	forget(name string) error
	// propose writes a batch, and decide its decision. Once the others can read them, written and decided are set, by the call or
	// by finish.
	propose(n uint64, b *proposal) error
	decide(n uint64, b *proposal) error
	// drop removes a batch that all members have applied.
	drop(n uint64, b *proposal) error
	// remove removes the files of victims. A missing file is not an error.
	remove(paths []string) error
	// finish ends a step. It is called even if the rest of the step failed.
	finish(now time.Duration) error
	// deposed reports whether an error of a step means that another host is the evictor.
	deposed(err error) bool
}

// forever is the end of a term that no other host can end unnoticed.
const forever = time.Duration(math.MaxInt64)
