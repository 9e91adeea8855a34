# SPDX-License-Identifier: Apache-2.0
"""The service that a user could write instead: FastAPI, pydantic and motor, one insert per request.

It does less than engage: it has no batches, no profiles and no detection of duplicates; a repeated
message id is answered with 500.
"""

import datetime
import os
import uuid
from typing import Any

from fastapi import FastAPI, Header, HTTPException
from motor.motor_asyncio import AsyncIOMotorClient
from pydantic import BaseModel, Field

app = FastAPI()
client: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], w="majority", journal=True)
events = client.get_default_database()["events"]


class Track(BaseModel):
    """A track event."""

    model_config = {"extra": "allow"}

    messageId: str = Field(default_factory=lambda: str(uuid.uuid4()), max_length=256)  # noqa: N815
    userId: str | None = Field(None, max_length=512)  # noqa: N815
    anonymousId: str | None = Field(None, max_length=512)  # noqa: N815
    event: str = Field(min_length=1, max_length=1024)
    properties: dict[str, Any] = {}
    context: dict[str, Any] = {}
    timestamp: datetime.datetime | None = None


@app.post("/v1/track")
async def track(body: Track, authorization: str = Header()) -> dict[str, Any]:
    if not authorization.startswith("Basic "):
        raise HTTPException(401)
    document = body.model_dump()
    document["_id"] = document["messageId"]
    document["receivedAt"] = datetime.datetime.now(datetime.UTC)
    await events.insert_one(document)
    return {"success": True, "messageId": body.messageId}
