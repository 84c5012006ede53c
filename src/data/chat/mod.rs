//! Conversations: messages in turns, written as text by a model's chat template, of which the answers are learned.
//!
//! ```text
//!  line or row -> messages -> template -> text, with the places of answers -> tokens, and which of them are given
//! ```
//!
//! The template is a program in Jinja that belongs to the tokenizer, and is run as transformers runs it. The special tokens
//! that it writes are recognised; the name of one within a message is text like any other. Rows hold whole conversations.

mod answers;
mod encode;
mod hidden;
mod messages;
mod python;
mod rows;
mod template;

pub use encode::ChatEncoder;
pub(super) use encode::EncodedChat;
pub(super) use messages::conversation;
pub use rows::ConversationRows;
pub use template::ChatTemplate;
