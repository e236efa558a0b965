//! Where keys and values live: how a cache is laid out, who owns which page, and how tokens get in.

pub mod append;
pub(crate) mod layout;
mod paged;

pub use layout::{KvCache, KvCacheMut, KvLayout};
pub use paged::{PageTable, get_seq_lens};
