//! The tree drawn for a person: a line a node, children in the order of their tokens.
//!
//! Invariant: the same tree gives the same text, whatever the order of its hash maps.

use std::fmt;

use super::{ROOT, RadixTree, node::Node};

/// Longer runs are cut: an edge may hold a whole document.
const MAX_SHOWN: usize = 8;

impl fmt::Display for RadixTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "root: {} pages of {} tokens, {} evictable, {}",
            self.num_pages(),
            self.page_size,
            self.num_evictable,
            Standing(&self.nodes[ROOT])
        )?;
        // A stack rather than a recursion: a conversation of many turns is a deep tree.
        let mut stack = Vec::new();
        self.push_children(&mut stack, ROOT, "");
        while let Some((index, indent, last)) = stack.pop() {
            let node = &self.nodes[index];
            let branch = if last { "└── " } else { "├── " };
            let (tokens, pages) = (Run(&node.tokens), Run(&node.pages));
            writeln!(f, "{indent}{branch}node {index}: tokens {tokens}, pages {pages}, {}", Standing(node))?;
            let below = if last { "    " } else { "│   " };
            self.push_children(&mut stack, index, &format!("{indent}{below}"));
        }
        Ok(())
    }
}

impl RadixTree {
    /// Pushes (index, indentation, whether it is the last sibling), so that the first child is popped first.
    fn push_children(&self, stack: &mut Vec<(usize, String, bool)>, index: usize, indent: &str) {
        let mut children: Vec<_> = self.nodes[index].children.iter().collect();
        children.sort_by(|a, b| b.0.cmp(a.0));
        let children = children.into_iter().enumerate();
        stack.extend(children.map(|(i, (_, &child))| (child, indent.to_owned(), i == 0)));
    }
}

/// What decides whether a node can go.
struct Standing<'a>(&'a Node);

impl fmt::Display for Standing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Node { own_locks, path_locks, last_access, .. } = self.0;
        write!(f, "locks {own_locks} of {path_locks}, used at {last_access}")
    }
}

/// The beginning of a list of numbers.
struct Run<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for Run<'_, T> {
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
