// Package budget divides the limited resources of a host among their holders: memory, file descriptors, and room for stores that wait.
//
// Half of a budget is reserved: each holder has an equal part of it, regardless of the others. The other half can be borrowed. A tenant may
// borrow at most as much as it leaves free, and a holder at most as much of its tenant's part as it leaves free of that. So a single tenant
// borrows at most half, two tenants at most a third each, and something is always left for the next one. Nothing is taken away from a
// holder: one that has more than its share gets no more until it has returned some.
//
// A resource may be needed in pieces that are larger than a share (Config.First). A holder's first piece may then exceed the share, and
// nothing is reserved for later holders.
//
// [Sessions] holds the budgets that sessions share, and a [Session] holds the parts of one session. Clients choose the sizes of messages
// and tables, so the memory that they make the host hold is estimated here.
package budget
