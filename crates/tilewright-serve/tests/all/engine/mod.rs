//! The engine's determinism: the output of a request depends only on the request.
//!
//! | | |
//! |---|---|
//! | [`invariants`] | chunks, page sizes, threads, dtypes, order of preempted requests |
//! | [`reuse`] | prefix reuse |
//! | [`forks`] | several continuations of one prompt |
//! | [`requests`] | end of requests, reports, and error texts |
//! | [`damage`] | NaN weights |
//! | [`soak`] | batch peers, arrivals, preemption, in random combinations with all of these |

mod damage;
mod forks;
mod invariants;
mod requests;
mod reuse;
pub(crate) mod session;
mod soak;
