//! `Display` of the tree: one line per node, children in token order.
//!
//! Invariant: equal trees give equal text, independent of hash map order.

use super::{ROOT, RadixTree, slab::Node};
use std::fmt;

/// Longer lists are truncated: an edge may hold a whole document.
const MAX_SHOWN: usize = 8;

impl fmt::Display for RadixTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "root: {} pages of {} tokens, {} evictable, {}",
            self.num_pages(),
            self.page_size,
            self.num_evictable,
            EvictionState(&self.nodes[ROOT])
        )?;
        // An explicit stack: multi-turn conversations make deep trees, and recursion could overflow.
        let mut stack = Vec::new();
        self.push_children(&mut stack, ROOT, "");
        while let Some((index, indent, last)) = stack.pop() {
            let node = &self.nodes[index];
            let branch = if last { "└── " } else { "├── " };
            let (tokens, pages) = (ListHead(&node.tokens), ListHead(&node.pages));
            writeln!(
                f,
                "{indent}{branch}node {index}: tokens {tokens}, pages {pages}, {}",
                EvictionState(node)
            )?;
            let below = if last { "    " } else { "│   " };
            self.push_children(&mut stack, index, &format!("{indent}{below}"));
        }
        Ok(())
    }
}

impl RadixTree {
    /// Pushes (index, indentation, whether last sibling) in reverse, so that the first child is popped first.
    fn push_children(&self, stack: &mut Vec<(usize, String, bool)>, index: usize, indent: &str) {
        let mut children: Vec<_> = self.nodes[index].children.iter().collect();
        children.sort_by(|a, b| b.0.cmp(a.0));
        let children = children.into_iter().enumerate();
        stack.extend(children.map(|(i, (_, &child))| (child, indent.to_owned(), i == 0)));
    }
}

/// The state of a node that decides whether it is evictable.
struct EvictionState<'a>(&'a Node);

impl fmt::Display for EvictionState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Node { own_locks, path_locks, last_access, .. } = self.0;
        write!(f, "locks {own_locks} of {path_locks}, used at {last_access}")
    }
}

/// The first elements of a list.
struct ListHead<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for ListHead<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[")?;
        for (i, number) in self.0.iter().take(MAX_SHOWN).enumerate() {
            let separator = if i == 0 { "" } else { " " };
            write!(f, "{separator}{number}")?;
        }
        match self.0.len().saturating_sub(MAX_SHOWN) {
            0 => write!(f, "]"),
            more => write!(f, " … {more} more]"),
        }
    }
}
