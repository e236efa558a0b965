//! Who owns which page and who runs next.

pub mod model;
