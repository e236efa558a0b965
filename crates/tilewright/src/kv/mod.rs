//! Where keys and values live: how a cache is laid out, who owns which page, what its scales are, and how tokens get in.

pub mod append;
mod block_sparse;
pub(crate) mod layout;
pub mod mla;
mod paged;
mod scales;
mod slots;

pub use block_sparse::{BlockSparse, VariableBlockSparse};
pub use layout::{KvCache, KvCacheMut, KvLayout, KvStrides};
pub use paged::{PageTable, get_seq_lens};
pub use scales::{KvScales, Scale, ScaleMut};
pub use slots::{PageSlots, Slot, Slots};
